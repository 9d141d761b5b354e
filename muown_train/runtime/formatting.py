"""Numbers as text for people."""


def format_perplexity(value: float) -> str:
    """Return a perplexity as text; that of a run that has diverged would have hundreds of digits."""
    return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"


def format_rate(tokens_per_second: float) -> str:
    """Return a speed as text: 12345.6 as "12,346 tokens/s", 1234567 as "1.235M tokens/s"."""
    if tokens_per_second >= 999_999.5:
        return f"{tokens_per_second / 1e6:.3f}M tokens/s"
    return f"{tokens_per_second:,.0f} tokens/s"


def format_duration(seconds: float) -> str:
    """Return a duration as text: 90 as "1m30s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
