"""Libraries that only an extra of this package installs, and the sentence for one that is missing."""

import importlib.util
from pathlib import Path

# the name by which a library is imported -> the extra that installs it; tests/test_packaging.py compares pyproject.toml
EXTRAS = {
    **dict.fromkeys(("datasets", "filelock", "huggingface_hub", "hydra", "matplotlib", "numpy", "omegaconf"), "train"),
    **dict.fromkeys(("pyarrow", "rich", "safetensors", "tiktoken", "tokenizers", "torch"), "train"),
    **dict.fromkeys(("transformers", "wandb", "yaml"), "train"),
    "lm_eval": "tasks",
    "tensorboard": "tensorboard",
    "wandb_workspaces": "wandb",
}
_PACKAGE = Path(__file__).resolve().parents[1]


def explain_import_error(error: ImportError) -> str | None:
    """Return one sentence that says how to install the library that is missing or too old.

    Returns:
        The sentence, or None where no extra of this package installs what could not be imported.
    """
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        return None
    return f"the library {library} cannot be imported ({error.msg}): {_format_command(EXTRAS[library])} installs it"


def check_installed(library: str) -> None:
    """Raise ValueError, with the command that installs it, for a library that is not there; nothing is imported.

    Args:
        library: a key of EXTRAS.
    """
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"the library {library} is not installed: {_format_command(EXTRAS[library])} installs it")


def _format_command(extra: str) -> str:
    """Return the command that installs an extra of what runs here: an installed wheel, or else a checkout."""
    is_wheel = (_PACKAGE / "configs").is_dir()  # in a checkout the folder lies beside the package
    return f"`pip install 'muown-train[{extra}]'`" if is_wheel else f"`pip install -e '{_PACKAGE.parent}[{extra}]'`"
