"""The fenced blocks of README.md and docs/, and what comments before a block say about testing it.

<!-- test: skip because REASON -->       the commands cannot run on a CPU in seconds
<!-- test: slow because REASON -->       Python that only the slow test runs
<!-- test: first COMMAND -->             makes what the block takes as given; run in bash before it
<!-- test: `A` as `B`; `C` as `D` -->    what is run has B in place of A, such as a smaller budget
<!-- test: file PATH -->                 the block is the content of a file that later blocks use
<!-- test: quotes PATH -->               every line of the block is a line of that file of the repository
<!-- test: prints exactly -->            what the command prints is the same on every machine
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "bash", "console", "text", "yaml", "bibtex"}
NOTE = re.compile(r"<!-- test: (.*) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int  # of its fence
    language: str
    content: str
    notes: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def list_notes(self, kind: str) -> list[str]:
        """What follows the first word of the notes that begin with it."""
        return [note.partition(" ")[2] for note in self.notes if note.partition(" ")[0] == kind]

    def list_commands(self) -> list[tuple[str, str]]:
        """The commands of a console block, each with the output that is shown."""
        commands = re.split(r"(?m)^\$ ", self.content)[1:]
        parts = [re.match(r"((?:.*\\\n)*.*)\n?", command) for command in commands]
        return [(part[1], command[part.end() :]) for part, command in zip(parts, commands, strict=True)]

    def shrink(self, text: str) -> str:
        """Text with the replacements that the notes ask for; the others must be in the block."""
        for note in self.notes:
            for old, new in re.findall(r"`(.*?)` as `(.*?)`", note):
                assert old in self.content, f"{self.place} has no {old}"
                text = text.replace(old, new)
        return text


def read_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    blocks: list[Block] = []
    notes: list[str] = []
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    for number, line in lines:
        if line.startswith("```"):
            content: list[str] = []
            for _, inner in lines:
                if inner == "```":
                    break
                content.append(inner)
            blocks.append(Block(page, number, line[3:], "\n".join(content) + "\n", tuple(notes)))
            notes = []
        elif note := NOTE.fullmatch(line):
            notes.append(note[1])
        else:
            assert not notes, f"{page.name}:{number}: no block follows a note on testing"
    return blocks


def split_commands(text: str) -> list[list[str]]:
    """The words of each simple command of a few lines of bash."""
    commands: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        commands.append([])
        for word in lexer:
            if word in ("&&", "||", "|", ";"):
                commands.append([])
            else:
                commands[-1].append(word)
    return [words for words in commands if words]


def make_slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def list_anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page outside of its blocks."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    return {make_slug(heading) for heading in re.findall(r"(?m)^#+ (.*)$", text)}
