"""Help texts in narrow terminals: paragraphs are wrapped, and columns and commands stay what they are."""

import textwrap

import pytest

from muown_train.runtime.formatting import fit_terminal

TEXT = """Train something on several lines of prose, which goes on
in the next line.

    name     what a name is, which takes more than one line of the text
             and goes on below it
    out      a folder
    $ first command
    $ second command

The end."""


def test_paragraphs_and_columns_are_wrapped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert fit_terminal(TEXT).splitlines() == [
        "Train something on several lines of",
        "prose, which goes on in the next line.",
        "",
        "    name     what a name is, which takes",
        "             more than one line of the",
        "             text and goes on below it",
        "    out      a folder",
        "    $ first command",
        "    $ second command",
        "",
        "The end.",
    ]


@pytest.mark.parametrize("text", ["", "\n", "one line", TEXT, textwrap.indent(TEXT, "  ")])
def test_what_fits_stays_as_it_is(monkeypatch, text):
    monkeypatch.setenv("COLUMNS", "80")
    assert fit_terminal(text) == text
