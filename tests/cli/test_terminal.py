"""Long lines are folded between words on a terminal and left alone elsewhere; those of a job's log have the time."""

import io
import sys

from hypothesis import given
from hypothesis import strategies as st

from muown_train.cli.terminal import FoldedStream, TimedStream, fold_lines, format_output


def test_the_rest_of_a_line_stands_below_its_last_column():
    assert fold_lines("model=     tiny    1.6M parameters: it trains in a minute", 40) == (
        "model=     tiny    1.6M parameters: it\n                   trains in a minute"
    )
    table = "  matrix  4 tensors  196 parameters  Muown  lr 0.004  weight decay 0"
    assert fold_lines(table, 40) == "  matrix  4 tensors  196 parameters\n      Muown  lr 0.004  weight decay 0"
    assert fold_lines("error: the file is not there", 20) == "error: the file is\nnot there"
    assert fold_lines("  4 tensors: they belong to Muown", 20) == "  4 tensors: they\n  belong to Muown"


@given(st.lists(st.text("ab ", max_size=60), max_size=4), st.integers(10, 40))
def test_no_word_is_lost_or_cut_and_short_lines_stay(lines, columns):
    text = "\n".join(lines)
    folded = fold_lines(text, columns)
    assert folded.split() == text.split()
    assert all(len(line) <= columns or len(line.split()) == 1 for line in folded.split("\n") if line.strip())
    assert max(map(len, lines), default=0) > columns or folded == text


def test_pieces_of_a_line_and_control_sequences_pass(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    written = io.StringIO()
    stream = FoldedStream(written)
    for piece in ("one two three", " four five six", "\n", "\x1b[1mone two three", "\none two three\n"):
        assert stream.write(piece) == len(piece)
    assert written.getvalue() == ("one two\nthree four five six\n\x1b[1mone two three\none two\nthree\n")


def test_only_terminals_are_folded(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.delenv("RANK", raising=False)
    format_output()
    assert isinstance(sys.stdout, FoldedStream) and sys.stderr is log


def test_lines_of_a_job_begin_with_the_time(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stdout", log)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("muown_train.cli.terminal.time.strftime", lambda form: "12:30:00 ")
    format_output()
    assert isinstance(sys.stdout, TimedStream)
    print("step 1\n\nstep", end=" ")
    print(2)
    assert log.getvalue() == "12:30:00 step 1\n12:30:00 \n12:30:00 step 2\n"
