"""A section of the configuration -> a callable with its settings checked against the signature that they are for.

A configuration may come from a stranger, with a run's folder or an experiment file. So `_target_` names only what
ALLOWED lists, or what the person who runs the program trusts, and that is looked up before anything is imported.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from muown_train.runtime.suggest import nearest

_TORCH = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD Muon NAdam RAdam RMSprop Rprop SGD"
_OURS = "Lion Muon Muown MuownSign NorMuon NorMuown SOAP"
ALLOWED = frozenset(
    {
        "muown_train.models.gpt.GPT",
        "muown_train.models.qwen2.Qwen2",
        "muown_train.models.speedrun.Speedrun",
        "muown_train.models.track3.Track3",
        *(f"muown_train.optim.{name}" for name in _OURS.split()),
        *(f"torch.optim.{name}" for name in _TORCH.split()),
        "muown_train.data.hub.dataset.hub_stream",
        "muown_train.data.random_tokens.random_tokens",
        "muown_train.data.shards.dataset.shards",
        "muown_train.data.sources.files",
        "muown_train.data.sources.stdlib",
        "muown_train.training.schedule.constant",
        "muown_train.training.schedule.cosine",
        "muown_train.training.schedule.decay_from",
        "muown_train.training.schedule.power_cooldown",
        "muown_train.training.schedule.wsd",
        "muown_train.analysis.probes.AttentionLogits",
        "muown_train.analysis.probes.EffectiveRank",
        "muown_train.analysis.probes.Spectral",
        "muown_train.training.tracking.tensorboard_sink.TensorBoardSink",
        "muown_train.training.tracking.wandb_sink.WandbSink",
    }
)


def factory(
    settings: Mapping[str, Any], section: str, given: Iterable[str] = (), trust: Sequence[str] = ()
) -> partial[Any]:
    """The `_target_` among settings with the others as its arguments.

    A mapping inside that has a `_target_` of its own is called for its value, or with `_partial_: true` becomes a
    callable. Of settings with interpolations, such as `${seed}`, give the resolved values.

    Args:
        section: what messages call the settings, such as `optim.rest`.
        given: arguments that come from the program and cannot be set.
        trust: targets that are allowed besides ALLOWED. Never take them from a stored configuration.

    Raises:
        ValueError: a target that is not allowed or does not exist; and see `check_settings`.
    """
    check_targets(settings, section, trust)  # all of them before the first is imported
    made = _callable(settings, section)
    check_settings(made.keywords, made, section, given)
    return made


def all_settings(settings: Mapping[str, Any], section: str, trust: Sequence[str] = ()) -> dict[str, Any]:
    """The settings that a section leaves to the signature of its target as well, by name.

    Raises:
        ValueError: see `factory`.
    """
    made = factory(settings, section, trust=trust)
    bound = inspect.signature(made.func).bind_partial(**made.keywords)
    bound.apply_defaults()
    return dict(bound.arguments)


def check_targets(settings: Any, section: str, trust: Sequence[str] = ()) -> None:
    """Refuse targets that are not allowed, at any depth.

    Raises:
        ValueError: naming the target and where it stands.
    """
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(settings, Mapping):
        inner = settings.items()
        target = settings.get("_target_")
        if "_target_" in settings and not (isinstance(target, str) and (target in ALLOWED or target in trust)):
            raise ValueError(
                f"{section}._target_={target!r} is not among what a configuration may name"
                f"{nearest(str(target), ALLOWED)}: if it is code you trust, give trust=[{target}] on the command line"
            )
    elif isinstance(settings, list | tuple):
        inner = enumerate(settings)
    for key, value in inner:
        check_targets(value, f"{section}.{key}", trust)


def _callable(settings: Any, section: str) -> partial[Any]:
    if not isinstance(settings, Mapping) or "_target_" not in settings:
        raise ValueError(f"{section} has no _target_: it must name the class or function that it is for")
    # a key of another type than str, as YAML allows, is no setting of anything: `check_settings` says so
    arguments = {str(k): _value(v, f"{section}.{k}") for k, v in settings.items() if k not in ("_target_", "_partial_")}
    return partial(_imported(settings["_target_"], section), **arguments)


def _value(value: Any, section: str) -> Any:
    """A setting as its target shall get it."""
    if isinstance(value, list | tuple):
        return [_value(item, f"{section}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {key: _value(item, f"{section}.{key}") for key, item in value.items()}
    made = _callable(value, section)
    check_settings(made.keywords, made, section)
    if value.get("_partial_", False) is True:
        return made
    try:
        return made()
    except TypeError as error:
        raise ValueError(f"{section} cannot be made: {error}") from error


def _imported(target: str, section: str) -> Callable[..., Any]:
    module, _, name = target.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{section}._target_={target} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"{section}._target_={target} is no class or function")
    return found


def defaults(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    """What the target of a section takes for arguments that are not given."""
    if "_target_" not in settings:
        return {}
    parameters = inspect.signature(_imported(settings["_target_"], section)).parameters
    return {key: parameter.default for key, parameter in parameters.items() if parameter.default is not parameter.empty}


def check_settings(settings: Any, target: partial[Any], section: str, given: Iterable[str] = ()) -> None:
    """Check names, and kinds of values as far as the defaults in the target's signature tell them.

    Raises:
        ValueError: a setting that is no argument of the target, with the nearest one that is, or one of another kind.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"{section}={settings!r} must be a mapping of settings, such as {{lr: 0.001}}")
    parameters = {key: p for key, p in inspect.signature(target.func).parameters.items() if key not in set(given)}
    for key, value in settings.items():
        if key not in parameters:
            raise ValueError(f"{section}.{key} is no setting of {target.func.__name__}{nearest(key, parameters)}")
        kind = _kind(parameters[key].default)
        if kind and _kind(value) != kind:
            raise ValueError(f"{section}.{key}={value!r} must be {kind}")


def _kind(value: Any) -> str | None:
    """The kind of a value in words; None for one that tells nothing."""
    if isinstance(value, bool):
        return "true or false"
    if is_number(value):
        return "a number"
    if isinstance(value, list | tuple) and value and all(map(is_number, value)):
        return f"{len(value)} numbers"
    return None


def is_number(value: Any) -> bool:
    """Whether value is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(key: str, value: Any, least: int) -> int:
    """`value` as an integer, also where it is written as 5e9.

    Raises:
        ValueError: naming the key, where it is none, less than `least` or beyond int64.
    """
    if not is_number(value) or value != int(value) or not least <= value < 2**63:
        raise ValueError(f"{key}={value!r} must be a whole number of at least {least} and less than 2^63")
    return int(value)
