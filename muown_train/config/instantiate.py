"""Make objects of configuration sections: `_target_` names a class or function, the other settings are its arguments.

A configuration may come from a stranger, with a run's folder or an experiment file. So `_target_` may only name what
ALLOWED lists or what the person who runs the program trusts, and this is checked before anything is imported.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from muown_train.config.checks import check_kind, is_number
from muown_train.config.extras import explain_import_error
from muown_train.config.renamed_names import update_target
from muown_train.runtime.suggest import suggest_nearest

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
        "muown_train.data.mix.mix",
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
        "muown_train.analysis.probes.Copying",
        "muown_train.analysis.probes.EffectiveRank",
        "muown_train.analysis.probes.Spectral",
        "muown_train.training.tracking.tensorboard_sink.TensorBoardSink",
        "muown_train.training.tracking.wandb_sink.WandbSink",
    }
)


def bind_target(
    settings: Mapping[str, Any], section: str, given: Iterable[str] = (), trust: Sequence[str] = ()
) -> partial[Any]:
    """Return the `_target_` of a section with the other settings bound as its arguments.

    A mapping inside that has a `_target_` of its own is called for its value, or with `_partial_: true` becomes a
    callable. Interpolations such as `${seed}` must have been resolved.

    Args:
        section: the name of the section in messages, such as `optim.rest`.
        given: arguments that the program provides and that no setting may give.
        trust: targets that are allowed besides ALLOWED. Never take them from a stored configuration.

    Raises:
        ValueError: the target is not allowed or does not exist, or a setting is wrong (see `check_settings`).
    """
    check_targets(settings, section, trust)  # all of them, before the first is imported
    target = _bind(settings, section)
    return partial(target.func, **check_settings(target.keywords, target, section, given))


def list_settings(settings: Mapping[str, Any], section: str, trust: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of a section with those that it leaves to its target's defaults.

    Raises:
        ValueError: see `bind_target`.
    """
    target = bind_target(settings, section, trust=trust)
    bound = inspect.signature(target.func).bind_partial(**target.keywords)
    bound.apply_defaults()
    return dict(bound.arguments)


def list_defaults(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return the default of every argument of a section's target that has one; {} where there is no target."""
    if "_target_" not in settings:
        return {}
    parameters = inspect.signature(_import_target(settings["_target_"], section)).parameters
    return {key: parameter.default for key, parameter in parameters.items() if parameter.default is not parameter.empty}


def check_targets(settings: Any, section: str, trust: Sequence[str] = ()) -> None:
    """Refuse targets that are not allowed, at any depth.

    Raises:
        ValueError: naming the target and where it stands.
    """
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(settings, Mapping):
        entries = settings.items()
        target = update_target(settings.get("_target_"))
        if "_target_" in settings and not (isinstance(target, str) and (target in ALLOWED or target in trust)):
            raise ValueError(
                f"{section}._target_={target!r} is not among what a configuration may name"
                f"{suggest_nearest(str(target), ALLOWED)}: if it is code you trust, "
                f"give trust=[{target}] on the command line"
            )
    elif isinstance(settings, list | tuple):
        entries = enumerate(settings)
    for key, value in entries:
        check_targets(value, f"{section}.{key}", trust)


def check_settings(settings: Any, target: partial[Any], section: str, given: Iterable[str] = ()) -> dict[str, Any]:
    """Return settings as the target takes them, checked against the names and annotations in its signature.

    Raises:
        ValueError: a setting is no argument of the target (with the nearest one that is), or is of another kind.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"{section}={settings!r} must be a mapping of settings, such as {{lr: 0.001}}")
    kinds = {key: kind for key, kind in _list_kinds(target.func).items() if key not in set(given)}
    for key in settings:
        if key not in kinds:
            raise ValueError(f"{section}.{key} is no setting of {target.func.__name__}{suggest_nearest(key, kinds)}")
    return {key: check_kind(f"{section}.{key}", value, kinds[key]) for key, value in settings.items()}


def _bind(settings: Any, section: str) -> partial[Any]:
    if not isinstance(settings, Mapping) or "_target_" not in settings:
        raise ValueError(f"{section} has no _target_: it must name the class or function that it configures")
    # YAML allows keys of other types than text; as text `check_settings` refuses them
    arguments = {
        str(key): _make_value(value, f"{section}.{key}")
        for key, value in settings.items()
        if key not in ("_target_", "_partial_")
    }
    return partial(_import_target(settings["_target_"], section), **arguments)


def _make_value(value: Any, section: str) -> Any:
    """Return a setting as its target receives it, with nested targets called."""
    if isinstance(value, list | tuple):
        return [_make_value(item, f"{section}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {key: _make_value(item, f"{section}.{key}") for key, item in value.items()}
    target = _bind(value, section)
    target = partial(target.func, **check_settings(target.keywords, target, section))
    if value.get("_partial_", False) is True:
        return target
    try:
        return target()
    except TypeError as error:
        raise ValueError(f"{section} cannot be made: {error}") from error


def _import_target(target: Any, section: str) -> Callable[..., Any]:
    module, _, name = str(update_target(target)).rpartition(".")
    try:
        imported: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        reason = (explain_import_error(error) if isinstance(error, ImportError) else None) or error
        raise ValueError(f"{section}._target_={target} cannot be imported: {reason}") from None
    if not callable(imported):
        raise ValueError(f"{section}._target_={target} is no class or function")
    return imported


@cache
def _list_kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotation of each argument; without one, what its default says."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except NameError:  # a name that the module imports for type checkers alone
        return {key: _infer_kind(p.default) for key, p in inspect.signature(function).parameters.items()}
    return {key: _infer_kind(p.default) if p.annotation is p.empty else p.annotation for key, p in parameters.items()}


def _infer_kind(default: Any) -> Any:
    """Return an annotation for an argument with this default: of a boolean, a number, or a row of numbers."""
    if isinstance(default, bool):
        return bool
    if is_number(default):
        return float
    if isinstance(default, list | tuple) and default and all(map(is_number, default)):
        return tuple[(float,) * len(default)]  # type: ignore[misc]
    return Any
