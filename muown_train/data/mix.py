"""Several sources of data as one, in the proportions of weights: `data=mix`.

Each source is what another data configuration makes. mixed_rows.py says which source a row is of.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from muown_train.config.checks import check_positive
from muown_train.data.mixed_rows import MixedRows, Mixture
from muown_train.data.sources import RunInfo, TrainingData, describe_tokenizer, files
from muown_train.data.text.documents import expand_globs, identify_file
from muown_train.runtime.progress import discard_line

CHOOSE = "such as +data@data.sources.web=files data.sources.web.train=GLOB +data@data.sources.code=shards"
Sources = dict[str, partial[TrainingData]]  # by name what makes the data of a source of a RunInfo


def mix(
    sources: object = None,
    weights: object = None,
    tokenizer: str | None = None,
    valid: str | Sequence[str] | None = None,
    end_of_text: str | None = None,
    special_tokens: bool = False,
    bos: bool = False,
    *,
    run: RunInfo,
) -> TrainingData:
    """Return several sources as one, whose rows are drawn from them in the proportions of the weights.

    What each source holds out is validated on in the same proportions.

    Args:
        sources: by name what makes the data of a source of a RunInfo, as `bind_target` binds a data configuration.
        weights: the positive weight of each source by its name; only their ratios count.
        tokenizer, end_of_text, special_tokens, bos: see `files`. Those that are not the default replace what sources
            have, where these have such a setting.
        valid: globs of files to validate on in place of what sources hold out; a source must read files.

    Raises:
        ValueError: a name, weight or tokenizer is wrong or missing, or a source cannot be made; the message names it.
    """
    makers = _check_sources(sources)
    checked = _check_weights(weights, list(makers))
    common = {"tokenizer": tokenizer, "end_of_text": end_of_text, "special_tokens": special_tokens, "bos": bos}
    makers = {name: _replace_settings(maker, common | {"valid": valid}) for name, maker in makers.items()}
    _check_named_tokenizers(makers)
    if not valid:
        _check_files_apart(makers)
    validated = [name for name, maker in makers.items() if valid and maker.keywords.get("valid") == valid][:1]
    if valid and not validated:
        raise ValueError(f"data.valid={valid} needs a source of files: each of {', '.join(makers)} holds out its own")
    shares = dict.fromkeys(makers, run.valid_tokens) if valid else _share_valid_tokens(checked, run.valid_tokens)
    data = {name: _make_source(name, maker, replace(run, valid_tokens=shares[name])) for name, maker in makers.items()}
    _refuse_different_tokenizers({name: _identify_tokenizer(each) for name, each in data.items()})
    held_out = _join_held_out([data[name].valid for name in validated or makers])
    rows = MixedRows({name: each.train for name, each in data.items()}, Mixture(checked, run.seed))
    first = next(iter(data.values())).tokenizer
    metadata = {
        "data": "mix",
        "mixture": " + ".join(f"{weight} {name}" for name, weight in checked.items()),
        **_join_identities({name: each.metadata for name, each in data.items()}),
        **describe_tokenizer(first),
        "held_out_tokens": len(held_out) - 1,
        "sources": {name: {"weight": checked[name], **each.metadata} for name, each in data.items()},
    }
    return TrainingData(rows, held_out, first, metadata, None)


def _check_sources(sources: object) -> Sources:
    """Return what makes each source, by name in alphabetical order."""
    if sources is None:
        raise ValueError(f"data.sources is not set: choose two or more, {CHOOSE}")
    if not isinstance(sources, Mapping):
        raise ValueError(f"data.sources={sources!r} must be two or more sources by name, {CHOOSE}")
    for name, maker in sources.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"data.sources has the name {name!r}, which must be text of letters, digits, _ and -")
        if not isinstance(maker, partial):
            given = f" has {', '.join(maker)}:" if isinstance(maker, Mapping) else f"={maker!r}"
            raise ValueError(f"data.sources.{name}{given} must be a data configuration, {CHOOSE}")
    if len(sources) < 2:
        raise ValueError(f"data.sources has {', '.join(sources) or 'none'}: choose two or more, {CHOOSE}")
    return {name: sources[name] for name in sorted(sources)}


def _check_weights(weights: object, names: Sequence[str]) -> dict[str, float]:
    """Return the weight of each source, in the order of `names`."""
    if not isinstance(weights, Mapping) or weights.keys() != set(names):
        given = "is not set" if weights is None else f"is {weights!r}"
        raise ValueError(
            f"data.weights {given}: it must give a weight to each source, such as "
            f"'data.weights={{{', '.join(f'{name}: {number}' for number, name in enumerate(names, 1))}}}'"
        )
    return {name: check_positive(f"data.weights.{name}", weights[name]) for name in names}


def _replace_settings(maker: partial[TrainingData], common: Mapping[str, Any]) -> partial[TrainingData]:
    """Return what makes a source with those of the common settings that are given and that it has."""
    own = inspect.signature(maker.func).parameters
    return partial(maker.func, **maker.keywords | {key: value for key, value in common.items() if value and key in own})


def _check_named_tokenizers(makers: Sources) -> None:
    """Refuse sources that cannot have the same tokenizer, before any of them is read."""
    named = {name: maker.keywords.get("tokenizer") for name, maker in makers.items()}
    for name, maker in makers.items():
        if maker.func is files and not named[name]:
            raise ValueError(
                f"data.tokenizer is not set, and data.sources.{name} would train a tokenizer of its own: give one for "
                "all sources, which `muown-train tokenizer` makes of texts"
            )
    _refuse_different_tokenizers({name: str(tokenizer) for name, tokenizer in named.items() if tokenizer})


def _check_files_apart(makers: Sources) -> None:
    """Refuse a file of two sources: one could train on what the other holds out."""
    owners: dict[object, str] = {}
    for name, maker in makers.items():
        if maker.func is not files or not maker.keywords.get("train"):
            continue
        for path in expand_globs(maker.keywords["train"], f"data.sources.{name}.train", discard_line, any_kind=True):
            owner = owners.setdefault(identify_file(path), name)
            if owner != name:
                raise ValueError(
                    f"{path} is both in data.sources.{owner} and in data.sources.{name}, and one could train on what "
                    "the other holds out: keep their files apart, or give files to validate on by data.valid"
                )


def _identify_tokenizer(data: TrainingData) -> str:
    described = describe_tokenizer(data.tokenizer)
    options = {key: described[key] for key in data.tokenizer.options}
    text = f"of {described['vocabulary']:,} entries with hash {described['tokenizer_hash']}"
    return text + "".join(f", {key} {value}" for key, value in options.items())


def _refuse_different_tokenizers(described: Mapping[str, str]) -> None:
    """Refuse sources whose tokenizers, each as a text that tells it from others, are not the same."""
    first = next(iter(described), None)
    for name, text in described.items():
        if first is not None and text != described[first]:
            raise ValueError(
                f"data.sources.{first} has the tokenizer {described[first]}, and data.sources.{name} the tokenizer "
                f"{text}: all sources of a mix must have the same. data.tokenizer, data.bos and data.end_of_text set "
                "it for all that can take another; data=stdlib has its own"
            )


def _share_valid_tokens(weights: Mapping[str, float], tokens: int) -> dict[str, int]:
    """Return how many held-out tokens each source has of `tokens`, whatever the seed."""
    shares = Mixture(weights, seed=0).count(tokens)
    for name, share in shares.items():
        if share < 1:
            raise ValueError(
                f"valid_tokens={tokens} leaves none to data.sources.{name} with weight {weights[name]}: give more, or "
                "files to validate on by data.valid"
            )
    return shares


def _make_source(name: str, maker: Callable[..., TrainingData], run: RunInfo) -> TrainingData:
    try:
        return maker(run=replace(run, progress=partial(_report, run.progress, name)))
    except ValueError as error:
        raise ValueError(f"data.sources.{name}: {error}") from error


def _report(progress: Callable[[str], None], name: str, line: str) -> None:
    """Report a line of a source; streams keep this function, and copies of them are made by pickling."""
    progress(f"data.sources.{name}: {line}")


def _join_held_out(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the held-out ids of all sources in a row, with as many targets as all parts have together."""
    return np.concatenate([*(part[:-1] for part in parts[:-1]), parts[-1]])


def _join_identities(described: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the entries of the metadata by which the data of a run are told from others (see config/resume_check.py).

    There is a `content` if that of every source is known before it is read, as that of streams is not.
    """
    content = {name: each.get("content") or each.get("revision") for name, each in described.items()}
    held_out = {name: each["held_out_content"] for name, each in described.items() if "held_out_content" in each}
    key = "content" if all("content" in each for each in described.values()) else "revision"
    joined = {key: content} | ({"held_out_content": held_out} if held_out else {})
    return {key: ", ".join(f"{name} {value}" for name, value in values.items()) for key, values in joined.items()}
