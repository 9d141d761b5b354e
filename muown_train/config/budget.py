"""From what the user sets (tokens) to what the loop counts (rows, updates)."""


def rows_per_update(batch_tokens: int, seq_len: int, micro_batch: int, ranks: int) -> int:
    """Rows of one update over all ranks.

    Args:
        batch_tokens: tokens per update; seq_len: tokens per row; micro_batch: rows per rank and forward.

    Raises:
        ValueError: they do not divide, with the nearest batches that can be made.
    """
    unit = seq_len * micro_batch * ranks
    if batch_tokens % unit:
        below = batch_tokens // unit * unit
        fits = [str(size) for size in (below, below + unit) if size]
        raise ValueError(
            f"batch_tokens={batch_tokens} cannot be made of micro_batch={micro_batch} rows of seq_len={seq_len} tokens "
            f"on {ranks} rank{'s' * (ranks > 1)}: it must be a multiple of {unit}, such as {' or '.join(fits)}"
        )
    return batch_tokens // seq_len


def updates(tokens: float | None, tokens_per_parameter: float | None, parameters: int, batch_tokens: int) -> int:
    """Number of updates that the budget pays for, rounded to the nearest.

    Raises:
        ValueError: no budget or two, or less than half an update.
    """
    if (tokens is None) == (tokens_per_parameter is None):
        raise ValueError(
            f"tokens={tokens} and tokens_per_parameter={tokens_per_parameter}: set one of them and the other to null"
        )
    budget = tokens if tokens is not None else (tokens_per_parameter or 0) * parameters
    count = round(budget / batch_tokens)
    if count < 1:
        raise ValueError(f"a budget of {budget:.0f} tokens is no update of batch_tokens={batch_tokens}")
    return count
