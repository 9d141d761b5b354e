"""Import a folder of `transformers` as the folder of a run."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from muown_train.config.compose import compose_config
from muown_train.config.instantiate import list_settings
from muown_train.config.run_name import check_new_folder
from muown_train.data.text.tokenizer import HubTokenizer, fingerprint_tokenizer, select_options
from muown_train.runs.hf import layouts
from muown_train.runs.hf.folder import TransformersFolder, read_transformers_folder
from muown_train.runs.saved_run import write_run


def import_folder(path: Path, out: Path) -> TransformersFolder:
    """Write the model of a folder of transformers to `out`, as a folder for every reader of runs, and return it.

    Weights become float32.

    Raises:
        ValueError: the folder holds a model that this package does not have, a weight is missing or has another shape,
            its tokenizer cannot be used, or `out` cannot be written to.
    """
    check_new_folder(out)
    theirs = read_transformers_folder(path)
    config: dict[str, Any] = OmegaConf.to_container(compose_config([]), resolve=True)  # type: ignore[assignment]
    # the folder does not say on what and how the model was trained
    config |= {"model": theirs.model, "seq_len": theirs.model["seq_len"], "data": {}, "optim": {}, "schedule": {}}
    config |= {"tokens": None, "name": None}
    data: dict[str, Any] = {}
    try:
        if theirs.tokenizer:
            options = select_options(theirs.origin)
            size = HubTokenizer(str(path), theirs.tokenizer, **options).size
            data = {"tokenizer": str(path), "tokenizer_hash": theirs.tokenizer_hash, "vocabulary": size, **options}
            data["tokenizer_file_hash"] = fingerprint_tokenizer(theirs.tokenizer)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    step, origin = theirs.origin.get("step", 0), {"imported": str(path)} | theirs.origin
    write_run(out, theirs.weights, config, step, data, theirs.tokenizer, origin)
    return theirs


def suggest_overrides(model: dict[str, Any]) -> list[str]:
    """Return the overrides that a command line with `init_from` needs to train a model of these settings."""
    group = f"model={layouts.find_layout(model['_target_']).GROUP}"
    known = dict(compose_config([group]).model)  # other keys need a plus
    defaults = list_settings({str(key): value for key, value in known.items()}, "model")
    given = [key for key in defaults if key in model and key != "seq_len" and model[key] != defaults[key]]
    return [group, *(f"{'' if key in known else '+'}model.{key}={model[key]}" for key in given)]
