"""Data that stop coming stop the run: saved, on all ranks together, and the same command goes on."""

import pytest

from muown_train.runtime.distributed import World
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import HERE, built, losses, metrics, slow_but, trained

MESSAGE = "file 3 failed; stopped after step 7, which is saved: the same command goes on"


class Failing:
    """A source of rows that fails at some row, as a stream does when the hub stays away."""

    raises: Exception = ConnectionError("file 3 failed")

    def __init__(self, rows, first):
        self.rows, self.first, self.seq_len = rows, first, rows.seq_len
        self.state_dict, self.load_state_dict = rows.state_dict, rows.load_state_dict

    def take(self, indices):
        if max(indices) >= self.first:
            raise self.raises
        return self.rows.take(indices)


def failing(world, corpus, out, failing_rank):
    """The message of a run whose data fail on one rank in the 8th step (of 8 rows)."""
    run = built(corpus, out, world=world)
    run.resume()
    if world.rank == failing_rank:
        run.trainer.loader._rows = Failing(run.trainer.loader._rows, 7 * 8)
    try:
        run.trainer.fit()
    except OSError as error:
        return str(error)
    finally:
        run.close()


def test_what_was_trained_is_saved(corpus, tmp_path):
    trained(corpus, tmp_path / "whole")
    assert failing(HERE, corpus, tmp_path, 0) == MESSAGE
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(8))
    trained(corpus, tmp_path)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole" / "run")
    hashes = [[line.get("data/hash") for line in metrics(folder / "run")] for folder in (tmp_path, tmp_path / "whole")]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("log_every", slow_but([7], [7, 10]))
def test_steps_after_the_failure_are_taken_back(corpus, tmp_path, log_every):
    """As on several ranks, where the others do not know of it at once."""
    intervals = [f"{key}={log_every}" for key in ("eval_every", "save_every", "log_every")]
    trained(corpus, tmp_path / "whole", *intervals)
    run = built(corpus, tmp_path, *intervals)
    run.resume()
    run.trainer.stop.should_stop = lambda: None
    taken = []
    rows = run.trainer.loader._rows = Failing(run.trainer.loader._rows, 7 * 8)
    run.trainer.loader._prefetch = 0
    rows.take = lambda indices: taken.append(min(indices)) or Failing.take(rows, indices)
    with pytest.raises(OSError, match=MESSAGE):
        run.trainer.fit()
    assert taken == [8 * k for k in range(8)]  # not asked again
    assert (run.trainer.step, run.trainer.tokens, run.trainer.loader.next_row) == (7, 7 * 256, 7 * 8)
    run.close()
    trained(corpus, tmp_path, *intervals)
    folder, whole = (tmp_path / "run", tmp_path / "whole" / "run")
    assert losses(folder) == losses(whole)
    assert [line.get("data/hash") for line in metrics(folder)] == [line.get("data/hash") for line in metrics(whole)]


@pytest.mark.parametrize("error", [AttributeError("no decode"), IndexError("index out of bounds"), RuntimeError()])
def test_errors_of_every_kind_stop_a_run_that_is_saved(corpus, tmp_path, capsys, error):
    run = built(corpus, tmp_path)
    run.resume()
    rows = run.trainer.loader._rows = Failing(run.trainer.loader._rows, 7 * 8)
    rows.raises = error
    said = str(error) or "RuntimeError"
    with pytest.raises(OSError, match=f"^{said}; stopped after step 7, which is saved: the same command goes on$"):
        run.trainer.fit()
    run.close()
    assert "Traceback" in capsys.readouterr().err  # such an error may be a mistake of the program
    assert trained(corpus, tmp_path).trainer.step == 12


def test_before_the_first_step_there_is_nothing_to_save(corpus, tmp_path):
    run = built(corpus, tmp_path)
    run.resume()
    run.trainer.loader._rows = Failing(run.trainer.loader._rows, 0)
    with pytest.raises(OSError, match="file 3 failed; stopped before the first step"):
        run.trainer.fit()
    run.close()
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert len(losses(trained(corpus, tmp_path).folder)) == 12


@pytest.mark.slow
@pytest.mark.parametrize("failing_rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_all_ranks_stop_together(corpus, tmp_path, failing_rank):
    assert on_ranks(2, failing, corpus, tmp_path, failing_rank) == [MESSAGE, MESSAGE]
    on_ranks(2, resumed, corpus, tmp_path)
    trained(corpus, tmp_path / "whole")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole" / "run"), abs=1e-4)


def resumed(world: World, corpus, out):
    trained(corpus, out, world=world)
