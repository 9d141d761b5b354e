"""Words of other tools: the error says what stands for them here."""

import re

import pytest
from hydra.errors import HydraException

from muown_train.cli.messages import HINTS, explain_error
from muown_train.config.compose import list_keys, list_options

KEYS = {key for options in ([], ["data=files"]) for key in list_keys(options)} | set(list_options())


@pytest.mark.parametrize("word", HINTS)
def test_a_word_of_another_tool_is_answered_with_what_stands_for_it(word):
    for key in (word, f"trainer.{word}"):
        expected = f"there is no key {key}; here it is {HINTS[word]}"
        assert explain_error(HydraException(f"Could not override '{key}'."), [f"{key}=1"]) == expected
        assert explain_error(ValueError(f"there is no key {key} (did you mean …?)"), [f"+{key}=1"]) == expected


@pytest.mark.parametrize("hint", sorted(set(HINTS.values())))
def test_the_keys_that_hints_name_exist(hint):
    named = set(re.findall(r"(?<![a-z-])([a-z_]+(?:\.[a-z_]+)?)=", hint))
    assert named or "no setting" in hint
    assert named <= KEYS


def test_a_key_that_is_only_not_an_optimizers_is_not_answered_with_itself():
    assert "here it is" not in explain_error(ValueError("optim.weight_decay is no setting of Mine"), [])
