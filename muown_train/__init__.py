"""Pre-training of language models with Muown; `muown_train.optim` is the optimizer library, which needs torch alone."""

__version__ = "0.1.0"
