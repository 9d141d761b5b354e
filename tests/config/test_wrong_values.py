"""Every setting of every option with values of every wrong kind and size: one sentence, and soon."""

import importlib
import inspect
import itertools
import re
import time
from collections.abc import Iterator

import pytest
from omegaconf import OmegaConf

from muown_train.config.budget import compute_steps
from muown_train.config.checks import LARGEST, check_kind, check_path, check_text, is_number
from muown_train.config.compose import check_choices, compose_config, flatten, list_options, load_config
from muown_train.config.instantiate import ALLOWED, _list_kinds, bind_target
from muown_train.config.schema import parse_config
from muown_train.models.gpt import GPT
from muown_train.training import build
from tests.cli.test_main import call
from tests.helpers.runs import SMALL

HUGE = ("1" + "0" * 18, "1" + "0" * 30, "9" * 400, "-" + "9" * 400, "1e18", "1e30", "-1e30", "1e400")
WRONG = (
    "abc",
    "",
    "null",
    "true",
    "[1]",
    "[]",
    "[abc,{a: 1}]",
    "{a: 1}",
    "inf",
    "-inf",
    "nan",
    "-1",
    "0",
    "0.5",
    *HUGE,
)
VALUES = [OmegaConf.to_container(OmegaConf.from_dotlist([f"x={word}"]))["x"] for word in WRONG]


def test_a_number_is_finite_and_fits_a_float():
    numbers = [value for value in VALUES if is_number(value)]
    assert numbers == [-1, 0, 0.5, 10**18, 10**30, 1e18, 1e30, -1e30]


QWEN2 = "muown_train.models.qwen2.Qwen2"  # whose library takes seconds to import


@pytest.mark.parametrize("target", [*sorted(ALLOWED - {QWEN2}), pytest.param(QWEN2, marks=pytest.mark.slow)])
def test_every_argument_of_every_target_has_a_kind_and_refuses_others(target):
    module, _, name = target.rpartition(".")
    if target == QWEN2:
        pytest.importorskip("transformers")
    function = getattr(importlib.import_module(module), name)
    given = {"params", "run", "context", "step", "steps", "warn"}
    for key, annotation in _list_kinds(function).items():
        if key in given or annotation is object:
            continue
        default = inspect.signature(function).parameters[key].default
        if default is not inspect.Parameter.empty:
            assert check_kind(key, default, annotation) == default
        with pytest.raises(ValueError, match=rf"^x\.{key}=\{{'a': 1\}} must be "):
            check_kind(f"x.{key}", {"a": 1}, annotation)
        for value in VALUES:
            try:
                taken = check_kind(f"x.{key}", value, annotation)
            except ValueError as error:
                assert str(error).startswith(f"x.{key}"), error
            else:
                assert not is_number(taken) or abs(taken) <= LARGEST


@pytest.mark.parametrize(
    "annotation, value, taken",
    [
        (str, 2024, "2024"),
        (str | None, None, None),
        (str | list[str], [2024, "a"], ["2024", "a"]),
        (float, 3, 3),
        (int, 5e9, 5e9),
        (tuple[float, float], [0.9, 1], [0.9, 1]),
        (object, {"a": 1}, {"a": 1}),
    ],
)
def test_values_of_the_right_kind_are_taken(annotation, value, taken):
    assert check_kind("x", value, annotation) == taken


@pytest.mark.parametrize(
    "annotation, value, part",
    [
        (str, 1e5, """x=100000.0 must be text, which quotes make of it: "x='…'\""""),
        (str, True, "x=True must be text"),
        (int, 0.5, "x=0.5 must be a whole number"),
        (int | None, "a", "x='a' must be a whole number or null"),
        (bool, "no", "x='no' must be true or false"),
        (float, 10**18, "must be a number of at most 10^15"),
        (tuple[float, float], [0.9], "x=[0.9] must be 2 numbers"),
        (tuple[float, float], [0.9, float("nan")], "must be 2 numbers"),
        (list[str], "a", "x='a' must be a list of texts"),
        (list[str], [[1]], "x.0=[1] must be text"),
    ],
)
def test_values_of_another_kind_are_said(annotation, value, part):
    with pytest.raises(ValueError, match=re.escape(part)):
        check_kind("x", value, annotation)


def test_every_key_of_a_run_refuses_what_it_cannot_be():
    settings = load_config(["model=tiny"]).to_dict()
    for key in settings:
        for value in VALUES:
            try:
                taken = getattr(parse_config(settings | {key: value}, "run"), key)
            except ValueError as error:
                assert re.match(rf"{key}\b", str(error)), error
            else:
                assert not is_number(taken) or abs(taken) < 2**63
    for key, value in (("sample_tokens", 10**18), ("tokens", 1e30), ("workers", 10**6), ("batch_tokens", 10**18)):
        with pytest.raises(ValueError, match=f"^{key}="):
            parse_config(settings | {key: value}, "run")


def test_a_budget_beyond_all_bounds():
    with pytest.raises(ValueError, match=r"a budget of 1e\+18 tokens is more than 10\^15"):
        compute_steps(None, 1e9, 10**9, 8192)


def test_numbers_are_names_of_folders(tmp_path):
    assert check_path("out", 2024) == "2024" and load_config(["out=2024", "cache=7"]).out == "2024"
    target = bind_target({"_target_": "muown_train.data.shards.dataset.shards", "path": 2024}, "data", ["run"])
    assert target.keywords == {"path": "2024"}


def test_paths_begin_with_a_users_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert load_config(["out=~/x"]).out == "/home/me/x"
    assert load_config(["init_from=~/x/"]).init_from == "/home/me/x"
    for word in ("out=~nobody-of-this-name/x", "init_from=~nobody-of-this-name/x"):
        with pytest.raises(ValueError, match="a user who does not exist"):
            load_config([word])
    for word in ("out=", "cache=", "init_from="):
        with pytest.raises(ValueError, match=f"^{word}'' must be "):
            load_config([word])
    with pytest.raises(ValueError, match="must be text"):
        check_text("x", [])


@pytest.mark.parametrize("word", ["seed=" + "9" * 5000, "optim.betas=[" + "1" * 5000 + ",1]", "name=" + "9" * 5000])
def test_numbers_of_thousands_of_digits_are_one_sentence(monkeypatch, word):
    status, said = call(monkeypatch, word)
    assert status == 2 and said.startswith("error: ") and len(said.splitlines()) == 1 and len(said) < 300


@pytest.mark.parametrize(
    "word", ["model=[1]", "model=[]", "data=[stdlib]", "optim/rest=[1]", "probes=[1]", "tracking=[1]"]
)
def test_a_list_is_no_option_of_a_group(word):
    with pytest.raises(ValueError, match=re.escape(word)):
        load_config([word])
    check_choices(["probes=[spectral]", "tracking=[wandb,tensorboard]", "model=tiny,small"])


def test_sizes_of_models_that_no_machine_can_hold(monkeypatch):
    sizes = {"vocab_size": 97, "dim": 32, "heads": 2, "seq_len": 16}
    with pytest.raises(ValueError, match=r"model\.layers=1000000 must be a positive integer of at most 4,096"):
        GPT(**sizes, layers=10**6)
    config = load_config(["model.dim=4194304"])
    with pytest.raises(ValueError, match=r"the weights of the model take [\d.]+ GiB, and this machine has"):
        build.check_memory(config)
    build.check_memory(load_config([]))


class _Reached(BaseException):
    """All settings were accepted, and data would be read now."""


SIZES = {
    "tiny": ("model.layers=1", "model.dim=32", "model.heads=2"),
    "speedrun": ("model.layers=1", "model.dim=32", "model.head_dim=16", "data=stdlib"),
    "track3": ("model.layers=1", "model.dim=32", "model.heads=2", "data=stdlib"),
    "qwen2_0_5b": (
        *("model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.mlp_hidden=64"),
        *("model.vocab_size=4096", "data=stdlib"),
    ),
}
TINY = ("model=tiny", *SIZES["tiny"])


def list_settings() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every key of every option, with the words that choose the option in a small run."""
    choices = [("model", (f"model={name}", *words)) for name, words in SIZES.items()]
    for group, options in list_options().items():
        if group in ("optim", "data", "schedule", "tracking"):
            choices += [(group, (f"{group}={option}", *TINY)) for option in options if option != "none"]
    choices += [("optim.rest", ("optim=soap", *TINY)), ("optim.rest", ("optim/rest=lion", *TINY))]
    choices += [("probes", ("probes=[spectral,effective_rank,attention_logits]", *TINY)), ("", TINY)]
    for group, words in choices:
        for key, _ in flatten(OmegaConf.to_container(compose_config(words), resolve=False)):
            if key.startswith(group) and (group or "." not in key):
                yield key, words


PARTS = 32


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.long if part else pytest.mark.slow) for part in range(PARTS)]
)
def test_every_key_of_every_option_ends_in_one_sentence(tmp_path, monkeypatch, part):
    def build_data(settings, run, trust=()):
        bind_target(settings, "data", ["run"], trust)
        raise _Reached

    pytest.importorskip("transformers")
    monkeypatch.setattr(build, "build_data", build_data)
    groups = list_options()
    small = [word for word in SMALL if not word.startswith(("model.", "data"))]
    cases = list(itertools.product(list_settings(), WRONG))[part::PARTS]  # each part has every key
    for (key, words), value in cases:
        every = [*words, f"out={tmp_path}", f"cache={tmp_path}/cache", *small]
        given = [word for word in every if key in groups or word.partition("=")[0] != key]
        if key == "model":
            given = [word for word in given if not word.startswith("model.")]
        started = time.process_time()
        try:
            status, said = call(monkeypatch, *given, f"{key}={value}")
        except _Reached:
            continue
        assert time.process_time() - started < 10, (key, value)
        is_sentence = said.startswith("error: ") and len(said.splitlines()) == 1 and len(said) < 800
        assert status == 2 and is_sentence, (*given, key, value, said)
