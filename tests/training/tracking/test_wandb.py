"""W&B: one run through any number of restarts, nothing hidden, and training that does not depend on it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import wandb

from muown_train.runs.metrics import Metrics
from muown_train.training.tracking import wandb_sink
from muown_train.training.tracking.wandb_sink import WandbSink, get_run_id
from tests.helpers.paths import ROOT
from tests.helpers.wandb_server import port_that, read_records, rows_of, served

KEY = "0123456789abcdef0123456789abcdef01234567"
# a run with a line every 10 ms, and how long training waited for its sink
SCRIPT = """
import json, sys, time
from pathlib import Path
from muown_train.cli.process import end_process
from muown_train.runs.metrics import Metrics
from muown_train.training.tracking.wandb_sink import WandbSink

folder, said, waits = Path(sys.argv[1]), [], []

def timed(call, *arguments):
    started = time.perf_counter()
    call(*arguments)
    waits.append(time.perf_counter() - started)

metrics = Metrics(folder)
sink = WandbSink(finish_timeout=float(sys.argv[2]), warn=said.append)
timed(sink.start, folder, {"note": sys.argv[3]}, 40)
for step in range(41):
    lines = [{"step": step, "tokens": 256 * step, "train/loss": 1 / (1 + step)}]
    metrics.append(lines)
    timed(sink.write, lines)
    time.sleep(0.01)
started = time.perf_counter()
sink.finish({"valid/loss": 0.5})
print(json.dumps({"said": said, "waits": waits, "finish": time.perf_counter() - started}))
end_process(0)  # as the command line
"""


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """No settings of W&B but those of the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def train(tmp_path: Path, patience: float, **environment: str) -> dict[str, Any]:
    """Run SCRIPT; what it printed, and how long it all took."""
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", SCRIPT, str(folder), str(patience), f"api_key={KEY}"]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started = time.monotonic()
    done = subprocess.run(command, env=os.environ | paths | environment, capture_output=True, text=True, timeout=120)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    assert "eprecat" not in done.stderr and "Traceback" not in done.stderr
    result = json.loads(done.stdout.splitlines()[-1]) | {"seconds": seconds, "folder": folder}
    waits = sorted(result["waits"])
    # the last few are left to other programs on the machine; a call that waited for W&B would take seconds
    assert waits[-4] < 0.05 and waits[-1] < 1
    assert result["finish"] < patience + 2
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 41
    said = done.stdout + done.stderr
    assert KEY not in said and not any(
        KEY.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file()
    )
    return result


def steps_offline(folder: Path) -> list[int]:
    """The steps that all parts of a run recorded, in the order of W&B's own count, which must be strict."""
    wandb.teardown()  # its process may still be writing what this one has finished, as it does when a program ends
    rows = [row for path in sorted(folder.rglob("*.wandb")) for row in rows_of(path)]
    counts = [row["_step"] for row in rows]
    assert counts == sorted(set(counts))
    return [row["step"] for row in rows]


def test_offline_one_run_through_two_restarts_and_a_rollback(clean, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"parameters": 1234, "ranks": 2, "git_commit": "abc", "groups": []}')
    # each part: the checkpoint it goes on from, and the last step before it was cut off
    parts = [(-1, 7), (4, 9), (8, 12)]
    for checkpoint, last in parts:
        metrics, said = Metrics(folder), []
        metrics.rewind(checkpoint)
        sink = WandbSink(group="g", tags=["a", "b"], mode="offline", warn=said.append)
        sink.start(folder, {"optim": {"_target_": "torch.optim.AdamW"}, "data": {"token": "hf_" + "x" * 30}}, 12)
        assert (folder / "wandb_id").exists()  # for the checkpoints
        for step in range(checkpoint + 1, last + 1):
            lines = [{"step": step, "tokens": 256 * step, "train/loss": 1.0, "valid/loss": float("nan")}]
            metrics.append(lines)
            sink.write(lines)
        sink.finish({"valid/loss": 2.0} if last == 12 else {})
        assert said == []
    assert steps_offline(folder) == [*range(8), *range(5, 10), *range(9, 13)]

    files = sorted(folder.rglob("*.wandb"))
    assert len(files) == 3
    kinds: dict[str, list[Any]] = {}
    for record in (record for path in files for record in read_records(path)):
        kinds.setdefault(record.WhichOneof("record_type"), []).append(record)
    runs = [record.run for record in kinds["run"]]
    assert {run.run_id for run in runs} == {get_run_id(folder)}
    assert all((run.project, run.run_group, list(run.tags)) == ("muown", "g", ["a", "b"]) for run in runs)
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["optim"] == {"_target_": "torch.optim.AdamW"} and config["data"] == {"token": "***"}
    assert config["run"] == {"optimizer": "AdamW", "parameters": 1234, "ranks": 2, "git_commit": "abc"}
    axes = [record.metric for record in kinds["metric"] if record.metric.glob_name == "*"]
    assert [axis.step_metric for axis in axes] == ["step"] * 3
    assert [record.exit.exit_code for record in kinds["exit"]] == [1, 1, 0]  # two were cut off


def test_lines_that_a_killed_process_did_not_hand_over_are_sent_again(clean, tmp_path):
    """The first process was killed with lines 3 to 7 on their way; the next one goes on after step 5."""
    folder, metrics = tmp_path, Metrics(tmp_path)

    def line(step: int) -> dict[str, Any]:
        return {"step": step, "tokens": 256 * step, "train/loss": float(step)}

    metrics.append(line(step) for step in range(8))
    (folder / "wandb_rows").write_text("3")
    metrics.rewind(5)
    for last in (7, 9):
        sink = WandbSink(mode="offline", warn=print)
        sink.start(folder, {}, 12)
        for step in (last - 1, last):
            metrics.append([line(step)])
            sink.write([line(step)])
        sink.finish({})
    # as many as were lost are sent again, of those that count
    assert steps_offline(folder) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (folder / "wandb_rows").read_text() == "12"


@pytest.mark.parametrize(
    "lines, kept, received, sent, row",
    [(10, 10, 10, [], 10), (10, 10, 4, [4, 5, 6, 7, 8, 9], 10), (10, 6, 0, [0, 1, 2, 3, 4, 5], 10), (4, 4, 9, [], 9)],
)
def test_the_servers_count_says_what_it_lacks(tmp_path, lines, kept, received, sent, row):
    class Recorder:
        step = received

        def log(self, line: dict[str, Any], step: int, commit: bool) -> None:
            logged.append((step, line["step"]))

    logged: list[tuple[int, int]] = []
    metrics = Metrics(tmp_path)
    metrics.append({"step": step, "tokens": step} for step in range(lines))
    metrics.rewind(kept - 1)
    sink = wandb_sink._WandbRun("online", {}, print)
    sink.count_lines(tmp_path)
    sink.run = Recorder()
    sink._send_missing_lines()
    assert [step for _, step in logged] == sent and sink.row == row
    assert [count for count, _ in logged] == list(range(row - len(sent), row))


@pytest.mark.slow
def test_offline_a_real_run_that_was_killed_goes_on_as_the_same(clean, corpus, tmp_path, monkeypatch):
    from muown_train.training.trainer import Trainer
    from tests.helpers.runs import built, trained

    run = built(corpus, tmp_path, "tracking=wandb", "tracking.mode=offline")
    step = Trainer.train_step
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", lambda self: step(self) if self.step < 7 else pytest.fail("killed"))
        run.resume()
        with pytest.raises(BaseException, match="killed"):
            run.trainer.fit()
    run.close()
    trained(corpus, tmp_path, "tracking=wandb", "tracking.mode=offline")
    ids = {path.stem for path in (tmp_path / "run").rglob("*.wandb")}
    assert ids == {f"run-{get_run_id(tmp_path / 'run')}"}
    assert sorted(set(steps_offline(tmp_path / "run"))) == list(range(13))


@pytest.mark.slow
def test_environment_variables_keep_their_meaning(clean, tmp_path):
    named = {"PROJECT": "p", "RUN_GROUP": "g", "TAGS": "a,b", "NAME": "n", "RUN_ID": "id7", "NOTES": "well"}
    result = train(tmp_path, 20, WANDB_MODE="dryrun", **{f"WANDB_{key}": value for key, value in named.items()})
    assert result["said"] == []
    (path,) = result["folder"].rglob("*.wandb")
    run = next(record.run for record in read_records(path) if record.WhichOneof("record_type") == "run")
    found = (run.project, run.run_group, ",".join(run.tags), run.display_name, run.run_id, run.notes)
    assert found == tuple(named.values())
    assert (result["folder"] / "wandb_id").read_text() == "id7"


@pytest.mark.slow
def test_disabled_writes_nothing(clean, tmp_path):
    assert train(tmp_path, 20, WANDB_MODE="disabled")["said"] == []
    assert not list(tmp_path.rglob("*.wandb"))


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"mode": "on"}, r"tracking.mode='on' must be one of online, offline, disabled"),
        ({"mode": False}, r"tracking.mode=False must be one of"),  # tracking.mode=false
        ({"tags": "ab"}, r"tracking.tags='ab' must be a list, such as \[ab\]"),
        ({"tags": ["fine", "x" * 65]}, r"tracking.tags='x+' must be a text of at most 64 letters for W&B, got 65"),
        ({"tags": [5]}, "tracking.tags=5 must be a text of at most 64 letters for W&B, got int"),
        ({"project": "x" * 129}, "tracking.project='x+' must be a text of at most 128 letters for W&B, got 129"),
        ({"project": "team/a b"}, "tracking.project='team/a b' must not contain / for W&B"),
        ({"group": "x" * 129}, "tracking.group='x+' must be a text of at most 128"),
        ({"finish_timeout": -1}, r"tracking.finish_timeout=-1 must be from 0 to 86400 seconds"),
        ({"finish_timeout": 10**18}, r"tracking.finish_timeout=10+ must be from 0 to 86400 seconds"),
    ],
)
def test_settings_that_cannot_be(clean, setting, message):
    with pytest.raises(ValueError, match=message):
        WandbSink(**setting)


def test_a_mode_of_the_environment_that_cannot_be(clean, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "no")
    with pytest.raises(ValueError, match="WANDB_MODE='no' must be one of"):
        WandbSink()
    WandbSink(mode="offline")


@pytest.mark.slow
def test_online(clean, tmp_path):
    with served("works") as server:
        address = f"http://127.0.0.1:{server.server_port}"
        result = train(tmp_path, 30, WANDB_API_KEY=KEY, WANDB_BASE_URL=address)
        assert result["said"] == [f"W&B: {address}/me/muown/runs/{get_run_id(result['folder'])}"]
        assert [row["step"] for row in server.rows] == list(range(41))
        assert [row["_step"] for row in server.rows] == list(range(41))
        assert "RunResumeStatus" in [asked["operationName"] for asked in server.asked]


def offline_because(result: dict[str, Any], reason: str) -> None:
    (sentence,) = result["said"]
    assert sentence.startswith("W&B: ") and reason in sentence and "\n" not in sentence
    assert sentence.endswith(f"; recording offline, `wandb sync {result['folder']}/wandb/*run-*` sends it")
    assert steps_offline(result["folder"]) == list(range(41))


@pytest.mark.slow
def test_not_logged_in(clean, tmp_path):
    offline_because(train(tmp_path, 30), "not logged in (`wandb login`)")


@pytest.mark.slow
def test_a_key_that_is_refused(clean, tmp_path):
    with served("401") as server:
        address = f"http://127.0.0.1:{server.server_port}"
        offline_because(train(tmp_path, 30, WANDB_API_KEY=KEY, WANDB_BASE_URL=address), "401")


@pytest.mark.slow
@pytest.mark.parametrize("listens", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_server_that_refuses_or_never_answers(clean, tmp_path, listens):
    with port_that(listens) as port:
        environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        offline_because(train(tmp_path, 40, **environment), f"127.0.0.1:{port}")


def test_a_server_that_never_answers_does_not_keep_the_process(clean, tmp_path):
    with port_that(listens=True) as port:
        environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        result = train(tmp_path, 0.5, **environment)
    folder = result["folder"]
    expected = f"W&B did not take everything within 0.5 s: `wandb sync {folder}/wandb/*run-*` sends the rest"
    assert result["said"] == [expected] and result["seconds"] < 20


@pytest.mark.slow
def test_a_server_that_stalls_does_not_keep_the_process(clean, tmp_path):
    with served("stalls") as server:
        address = f"http://127.0.0.1:{server.server_port}"
        result = train(tmp_path, 4, WANDB_API_KEY=KEY, WANDB_BASE_URL=address)
    said = [sentence for sentence in result["said"] if address not in sentence]
    assert len(said) == 1 and "did not take everything within 4 s" in said[0] and result["seconds"] < 25
    assert steps_offline(result["folder"]) == list(range(41))  # so that `wandb sync` sends all


@pytest.mark.parametrize(
    "name, value", [("WANDB_PROJECT", "a/b"), ("WANDB_PROJECT", "x" * 129), ("WANDB_NAME", "x" * 129)]
)
def test_names_of_the_environment_that_cannot_be(clean, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='.*' must"):
        WandbSink(mode="offline")


@pytest.fixture
def opened(clean, monkeypatch):
    """What runs are opened with at W&B."""
    opened: list[dict[str, Any]] = []

    def init(**options: Any) -> MagicMock:
        opened.append(options)
        return MagicMock(step=0)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    return opened


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_longer_name_of_a_run_is_cut(opened, tmp_path, mode):
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    wandb_sink._WandbRun(mode, {}, print).start(folder, {}, 12)
    assert [options["name"] for options in opened] == ["long" * 32]


def test_secrets_in_its_names_are_hidden(opened, tmp_path, monkeypatch):
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    hidden = {"project": "of ***", "entity": "***", "group": "*** x", "tags": ["***"], "name": "a *** b"}
    monkeypatch.setenv("WANDB_NAME", f"a {secret} b")
    given = {"project": f"of {secret}", "entity": secret, "group": f"{secret} x", "tags": [secret]}
    WandbSink(**given, mode="offline").run.start(tmp_path, {}, 12)
    for name in ("PROJECT", "ENTITY", "RUN_GROUP"):
        monkeypatch.setenv(f"WANDB_{name}", secret)
    WandbSink(mode="offline").run.start(tmp_path, {}, 12)
    first, second = [{key: options[key] for key in hidden} for options in opened]
    assert first == hidden and second == dict.fromkeys(hidden, "***") | {"tags": None, "name": "a *** b"}
