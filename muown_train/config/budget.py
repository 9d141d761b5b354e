"""Steps and rows of a run: from the tokens that a user sets to what the trainer counts."""

from muown_train.config.checks import LARGEST


def compute_batch_rows(batch_tokens: int, seq_len: int, micro_batch: int, ranks: int) -> int:
    """Return the rows of one step over all ranks.

    Args:
        batch_tokens: tokens per step.
        seq_len: tokens per row.
        micro_batch: rows per rank and forward pass.

    Raises:
        ValueError: the batch cannot be divided so; the message names the nearest batches that can.
    """
    unit = seq_len * micro_batch * ranks
    if batch_tokens % unit:
        below = batch_tokens // unit * unit
        possible = [str(size) for size in (below, below + unit) if size]
        raise ValueError(
            f"batch_tokens={batch_tokens} cannot be made of micro_batch={micro_batch} rows of seq_len={seq_len} tokens "
            f"on {ranks} rank{'s' * (ranks > 1)}: it must be a multiple of {unit}, such as {' or '.join(possible)}"
        )
    return batch_tokens // seq_len


def compute_steps(tokens: float | None, tokens_per_parameter: float | None, parameters: int, batch_tokens: int) -> int:
    """Return the number of steps that the budget pays for, rounded to the nearest.

    Raises:
        ValueError: neither or both budgets are given, or the budget is less than half a step or more than LARGEST.
    """
    if (tokens is None) == (tokens_per_parameter is None):
        raise ValueError(
            f"tokens={tokens} and tokens_per_parameter={tokens_per_parameter}: set one of them and the other to null"
        )
    budget = tokens if tokens is not None else (tokens_per_parameter or 0) * parameters
    if budget > LARGEST:
        raise ValueError(f"a budget of {budget:.3g} tokens is more than 10^15, the largest that a run may have")
    steps = round(budget / batch_tokens)
    if steps < 1:
        raise ValueError(f"a budget of {budget:.0f} tokens is less than one step of batch_tokens={batch_tokens}")
    return steps
