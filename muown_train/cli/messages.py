"""Errors as one sentence for a person: unwrapped from Hydra's layers, with the nearest name that exists, no secrets."""

import errno
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import NoReturn

from hydra._internal.utils import get_args_parser  # there is no public way to know Hydra's flags
from omegaconf import OmegaConf

from muown_train.cli.process import is_output_closed
from muown_train.config.compose import CONFIG_DIR, GROUPS, LIST_GROUPS, flatten, list_keys, list_options
from muown_train.config.overrides import is_override
from muown_train.runtime.formatting import escape_controls
from muown_train.runtime.redaction import redact
from muown_train.runtime.suggest import explain_stray_word, find_nearest_key, suggest_nearest

_EPOCH = "tokens=, the tokens to train on; an epoch is one pass over the data, so E epochs of N tokens are tokens=E*N"
_STEPS = "tokens= or tokens_per_parameter=; a run has tokens / batch_tokens steps"
_WARMUP = "schedule.warmup=, a fraction of the run from 0 to 1: steps / all steps"
_DEVICE = "device=auto, cpu or cuda; by default a GPU is used where there is one"
_RANKS = "no setting: torchrun --nproc-per-node=GPUS -m muown_train … trains on several GPUs"
_RESUME = "no setting: the same command goes on from the run's last checkpoint by itself"
_SOURCE = "model=, one of this package's, and init_from=FOLDER for the weights of a run or of a Hugging Face folder"
# words of other tools, without their section, and what stands for them here
HINTS = {
    **dict.fromkeys(("epochs", "epoch", "num_epochs", "max_epochs", "n_epochs", "num_train_epochs"), _EPOCH),
    **dict.fromkeys(("steps", "max_steps", "num_steps", "total_steps", "train_steps", "max_train_steps"), _STEPS),
    **dict.fromkeys(("num_iterations", "iterations", "iters", "max_iters", "train_iters"), _STEPS),
    **dict.fromkeys(("max_tokens", "total_tokens", "train_tokens"), "tokens=, the tokens to train on"),
    **dict.fromkeys(("devices", "accelerator", "use_cuda", "cuda", "use_cpu", "no_cuda"), _DEVICE),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpu", "nproc", "nproc_per_node", "num_nodes", "world_size"), _RANKS),
    **dict.fromkeys(("lr", "learning_rate", "base_lr", "max_lr", "peak_lr"), "optim.lr=, the largest learning rate"),
    **dict.fromkeys(("weight_decay", "wd"), "optim.weight_decay="),
    **dict.fromkeys(("momentum", "betas"), "optim.momentum= and optim.betas=, as far as the optimizer has them"),
    **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2"), "optim.betas=[B1,B2]"),
    **dict.fromkeys(("optimizer", "optimizer_name", "optim_name"), "optim=, such as optim=adamw"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps", "warmup_iters", "warmup_ratio", "lr_warmup_steps"), _WARMUP),
    **dict.fromkeys(
        ("scheduler", "lr_scheduler", "lr_scheduler_type", "lr_schedule"), "schedule=, such as schedule=cosine"
    ),
    **dict.fromkeys(
        ("batch_size", "global_batch_size", "train_batch_size"),
        "batch_tokens=, tokens per step over all ranks (rows * seq_len), and micro_batch=, rows of a rank at a time",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "device_batch_size", "per_device_batch_size", "per_device_train_batch_size"),
        "micro_batch=, rows of a rank at a time",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum_steps", "accumulate_grad_batches"),
        "no setting: it follows from batch_tokens=, micro_batch= and the number of ranks",
    ),
    **dict.fromkeys(
        (
            "block_size",
            "context_length",
            "max_seq_len",
            "max_seq_length",
            "sequence_length",
            "max_length",
            "seq_length",
        ),
        "seq_len=, tokens of a row",
    ),
    **dict.fromkeys(("max_grad_norm", "clip_grad", "grad_clip_norm", "gradient_clip_val", "clip"), "grad_clip="),
    **dict.fromkeys(
        ("dtype", "bf16", "fp16", "mixed_precision"), "precision=bfloat16, precision=float32 or precision=auto"
    ),
    **dict.fromkeys(
        ("output_dir", "out_dir", "save_dir", "log_dir", "outdir"), "out=, the folder of all runs, and name="
    ),
    **dict.fromkeys(("run_name", "experiment_name", "exp_name"), "name=, of the run's folder in out="),
    **dict.fromkeys(("model_name", "model_name_or_path", "pretrained_model_name_or_path"), _SOURCE),
    **dict.fromkeys(
        ("dataset", "dataset_name", "train_data", "data_path"), "data=, such as data=files data.train='texts/*.txt'"
    ),
    **dict.fromkeys(("resume", "resume_from", "resume_from_checkpoint", "load_checkpoint"), _RESUME),
    **dict.fromkeys(("eval_steps", "eval_interval", "val_interval"), "eval_every=, steps between two evaluations"),
    **dict.fromkeys(("save_steps", "save_interval", "checkpoint_every"), "save_every=, steps between two checkpoints"),
    **dict.fromkeys(("logging_steps", "log_interval", "log_steps"), "log_every=, steps between two lines"),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "workers=, processes per rank that read streams"),
    **dict.fromkeys(
        ("report_to", "wandb", "use_wandb", "logger"), "tracking=wandb, tensorboard or [wandb,tensorboard]"
    ),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_hidden_layers"), "model.layers="),
    **dict.fromkeys(("n_embd", "hidden_size", "d_model", "n_embed"), "model.dim="),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), "model.heads="),
}


def explain_error(error: BaseException, overrides: Sequence[str]) -> str:
    """Return one sentence that says what went wrong.

    Args:
        overrides: the `key=value` words that were given, among which the cause may stand.
    """
    sentence, may_open_files = None, not lacks_descriptors()
    if may_open_files:  # Python 3.13 passes over folders of configuration files that it cannot read
        with suppress(Exception):
            sentence = _explain_override(overrides) or _explain_key(str(error), overrides)
    sentence = sentence or _explain_exception(error)
    if not may_open_files:  # a file that cannot be opened may have passed for one that is not there
        sentence += " (this process may open no more files: see `ulimit -n`)"
    sentence = escape_controls(redact(sentence))
    return re.sub(r"\w{200,}", lambda word: f"{word[0][:40]}… ({len(word[0])} characters)", sentence)


def lacks_descriptors() -> bool:
    """Return whether this process, or the machine, can open no more files."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


def _explain_override(overrides: Sequence[str]) -> str | None:
    """Say which word cannot be read or chooses an option that does not exist, if one does."""
    options = list_options()
    for i, override in enumerate(overrides):
        if not is_override(override):
            return explain_stray_word(overrides, i)
        if override.endswith("=") and overrides[i + 1 : i + 2] and "=" not in overrides[i + 1]:
            return explain_stray_word(overrides, i + 1)
        key, _, value = override.partition("=")
        group = key.lstrip("+").partition("@")[0]  # data@data.sources.web chooses an option of data too
        is_list = group in LIST_GROUPS and value.startswith("[")
        for choice in map(str.strip, value.strip("[] ").split(",") if is_list else [value]):
            if group in options and choice not in options[group] and not (is_list and not choice):
                others = ", ".join(options[group]) or "none"
                return f"there is no {key}={choice}{suggest_nearest(choice, options[group])}; there are {others}"
    return None


def _explain_key(text: str, overrides: Sequence[str]) -> str | None:
    """Say what Hydra's complaint about a key means, if it is one."""
    if ambiguous := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, value = ambiguous.groups()
        return f"{key}={value}: text with a comma is \"{key}='{value}'\", a list '{key}=[{value}]'"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if not unknown:
        added = re.match(
            r"there is no key ([\w.]+)|([\w.]+) is no setting of ", text
        )  # +KEY=VALUE, found by our checks
        return _hint_at_key(added[1] or added[2]) if added else None
    key, known = unknown.group(1), list_keys(overrides)
    if key not in known:
        return _explain_unknown_key(key, known)
    entries = [name for name in known if name.startswith(f"{key}.")]  # a mapping was given in place of these
    return f"a key of {key} is not among {', '.join(entries)}; further ones are given as +{key}.KEY=VALUE"


def _explain_exception(error: BaseException) -> str:
    while error.__cause__ is not None and type(error).__module__.startswith(("hydra", "omegaconf")):
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        if error.filename is None and len(error.args) == 1:  # one of our own sentences, which says what was written
            return f"{error}; make room, and the same command goes on"
        return f"{error.filename or 'the output, or a file'}: the disk is full: make room, and the same command goes on"
    if isinstance(error, BrokenPipeError) and is_output_closed():
        return "nobody reads what it prints any more"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _explain_unknown_key(key: str, known: list[str]) -> str:
    if "/" in key:
        return f"there is no group {key}{suggest_nearest(key, (group for group in list_options() if '/' in group))}"
    elsewhere = _map_keys_to_options()
    if key in elsewhere:
        return f"there is no key {key} with the options chosen; {elsewhere[key]} has it"
    if hint := _hint_at_key(key):
        return hint
    known = [name for name in known if not name.rpartition(".")[2].startswith("_")]
    meant = find_nearest_key(key, [*known, *elsewhere])
    if meant:
        option = "" if meant in known else f", of {elsewhere[meant]}"
        return f"there is no key {key} (did you mean {meant}{option}?)"
    return f"there is no key {key}; --help shows the most used, python -m muown_train --cfg job all"


def _hint_at_key(key: str) -> str | None:
    """Say what stands for a key that is a word of other tools, if it is one."""
    hint = HINTS.get(key.rpartition(".")[2].lower())
    if hint is None or re.search(rf"(?<![\w.]){re.escape(key.lower())}=", hint) or key.startswith("optim.rest."):
        return None
    return f"there is no key {key}; here it is {hint}"


@cache
def _map_keys_to_options() -> dict[str, str]:
    """Return every dotted key that an option of a config group brings, with that option, such as schedule=wsd."""
    options_by_key: dict[str, str] = {}
    for group, options in list_options().items():
        for option in options if group != "experiment" else ():  # an experiment sets keys of the others
            text = (CONFIG_DIR / group / f"{option}.yaml").read_text()
            prefix = "" if text.startswith("# @package _global_") else group.replace("/", ".") + "."
            keys = flatten(OmegaConf.to_container(OmegaConf.create(text), resolve=False) or {}, prefix)
            options_by_key |= {key: f"{group}={option}" for key, _ in keys if not re.search(r"(^|\.)(_|defaults)", key)}
    return options_by_key


def check_flags(words: Sequence[str]) -> list[str]:
    """Return the settings among words, and refuse words that begin with a dash and are not Hydra's flags.

    Hydra would answer those with its usage.

    Args:
        words: the words of the command line.

    Raises:
        ValueError: naming the word, with the setting or the flag that was meant, or a folder that is not there.
    """
    parser = get_args_parser()
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for word in words:
        key, equals, value = word.lstrip("-").partition("=")
        is_setting = word.startswith("-") and bool(equals or key in (*GROUPS, *list_keys([])))
        if is_setting and f"--{key}" not in flags and word not in flags:
            raise ValueError(f"{word} is no flag: settings have no dashes, as in {key}={value or '…'}")
    parser.error = _refuse  # type: ignore[method-assign]
    known, others = parser.parse_known_args(words)
    folder = known.config_dir
    if folder is not None and not os.path.isdir(folder):
        raise ValueError(
            f"--config-dir {folder} is no folder: give one with configuration files beside those of configs/"
        )
    for word in others:
        if word.startswith("-"):
            raise ValueError(f"there is no flag {word}{suggest_nearest(word, flags)}; see --help")
        raise ValueError(f"{word} stands apart from other settings: flags go before or after all of them")
    settings: list[str] = known.overrides
    return settings


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"{message}; see --help")
