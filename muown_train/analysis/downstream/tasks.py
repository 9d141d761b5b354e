"""Downstream tasks of lm_eval (EleutherAI's harness), measured on a model while it trains.

The harness sees one process that scores texts; inside, the ranks share the forward passes. A file of a task may name
code of its own, so tasks come from the command line alone (see `config.compose.check_config`).
"""

import io
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from importlib import import_module
from typing import Any

import torch

from muown_train.analysis.downstream.scores import Pair, Score, score_continuations
from muown_train.config.extras import check_installed
from muown_train.data.hub.retry import describe_cause, is_transient
from muown_train.data.text.tokenizer import Tokenizer
from muown_train.models.language_model import LanguageModel
from muown_train.runs.checkpoint_reader import print_warning
from muown_train.runs.state import RandomState
from muown_train.runtime.distributed import World
from muown_train.runtime.heartbeat.explain import describe_error
from muown_train.runtime.suggest import suggest_nearest

SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")  # kinds of tasks that need no generated text
SECONDS = "tasks/seconds"


class DownstreamTasks:
    """Tasks that are measured again and again.

    Args:
        tasks: from `load_tasks`; only the main rank needs them.
        limit: documents of each task; None takes all.
        model: on world.device.
        rows: the most rows per rank and forward pass.
        autocast: returns a context for forward passes in the run's precision.
        check_stop: is called before each forward pass, equally often on every rank; it raises to end a measurement.
    """

    def __init__(
        self,
        tasks: Any,
        limit: int | None,
        model: LanguageModel,
        tokenizer: Tokenizer,
        world: World,
        seq_len: int,
        rows: int,
        autocast: Callable[[], Any],
        check_stop: Callable[[], None],
    ) -> None:
        self.tasks, self.limit, self.model, self.world, self.autocast = tasks, limit, model, world, autocast
        self.is_scoring = False
        end, size = tokenizer.end_of_text, tokenizer.size

        def encode(text: str) -> list[int]:
            return list(map(int, tokenizer.encode_batch([text])[0]))

        def score(pairs: Sequence[Pair]) -> list[Score]:
            whole = [(context or [end], continuation) for context, continuation in pairs]
            return score_continuations(model, whole, seq_len, rows, world, size, check_stop)

        self.score = score
        self.lm = make_lm(self._score_on_all, encode, end, seq_len) if world.is_main else None

    def __call__(self) -> dict[str, float]:
        """Return `tasks/TASK/METRIC` for each task, and the seconds that all took; a collective call.

        The harness runs on the main rank, and the other ranks, which return nothing, share its forward passes. If it
        fails, a warning says so and there are no numbers.
        """
        random_state = RandomState(self.world)
        before = random_state.state_dict()
        self.model.eval()
        try:
            # compiled blocks would be compiled for rows of every length
            with self.autocast(), torch.compiler.set_stance("force_eager"):
                if self.world.is_main:
                    return self._measure()
                while (pairs := self.world.broadcast(None)) is not None:
                    self.score(pairs)
                return {}
        finally:
            self.model.train()
            random_state.load_state_dict(before)

    def _measure(self) -> dict[str, float]:
        evaluator = import_module("lm_eval.evaluator")
        started = time.perf_counter()
        self.is_scoring = False
        try:
            with redirect_stderr(io.StringIO()):  # the harness draws bars there
                options = {"limit": self.limit, "bootstrap_iters": 0, "log_samples": False}
                found = evaluator.evaluate(lm=self.lm, task_dict=self.tasks, **options)
            numbers = flatten_results(found["results"]) | {SECONDS: time.perf_counter() - started}
        except Exception as error:  # metrics of tasks raise any kind
            if self.is_scoring:  # a stop, or a fault of a forward pass: no other rank waits for more pairs
                raise
            print_warning(f"the downstream tasks are not measured this time: {describe_error(error)}")
            numbers = {}
        self.world.broadcast(None)  # the other ranks go on
        return numbers

    def _score_on_all(self, pairs: Sequence[Pair]) -> list[Score]:
        self.world.broadcast(pairs)
        self.is_scoring = True
        scores = self.score(pairs)
        self.is_scoring = False
        return scores


def load_tasks(names: Sequence[str]) -> Any:
    """Return tasks as lm_eval keeps them.

    Args:
        names: names of tasks and groups of lm_eval, or paths of YAML files.

    Raises:
        ValueError: lm_eval is not installed, or a task does not exist, cannot be read, or generates text.
        ConnectionError: the data of a task cannot be fetched now.
    """
    check_installed("lm_eval")
    manager = import_module("lm_eval.tasks").TaskManager(include_defaults=not all(map(_is_file, names)))
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            with redirect_stderr(io.StringIO()):
                found = manager.load([name])
        except Exception as error:  # the harness and its readers of data raise many kinds
            if not _is_file(name) and name not in manager.all_tasks:
                near = suggest_nearest(name, manager.all_tasks)
                raise ValueError(
                    f"tasks: lm_eval has no {name}{near}; `lm-eval ls tasks` lists what there is"
                ) from error
            kind = ConnectionError if is_transient(error) else ValueError
            raise kind(f"tasks: {name} cannot be read by lm_eval ({describe_cause(error)})") from error
        for key, entries in found.items():
            loaded[key].update(entries)
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE not in SCORED:
            raise ValueError(
                f"tasks: {name} is of the kind {task.OUTPUT_TYPE}: during training there are {', '.join(SCORED)}, and "
                "`muown-train export` makes a folder that lm_eval measures with any"
            )
    return loaded


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def make_lm(
    score: Callable[[Sequence[Pair]], list[Score]], encode: Callable[[str], list[int]], end: int, seq_len: int
) -> Any:
    """Return a model as lm_eval sees one.

    Args:
        score: returns the score of each continuation.
        encode: returns the ids of a text.
        end: the id that stands before a text.
        seq_len: the most ids that the model reads.
    """
    model, utils = import_module("lm_eval.api.model"), import_module("lm_eval.utils")

    class TrainedModel(model.TemplateLM):  # type: ignore[misc, name-defined]
        @property
        def eot_token_id(self) -> int:
            return end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return encode(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[Score]:
            return score([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            pairs: list[Pair] = []
            owners: list[int] = []
            for i, request in enumerate(requests):
                windows = utils.get_rolling_token_windows(encode(request.args[0]), end, seq_len, 1)
                own = [utils.make_disjoint_window(window) for window in windows]
                pairs += own
                owners += [i] * len(own)
            totals = [0.0] * len(requests)
            for i, (log_p, _) in zip(owners, score(pairs), strict=True):
                totals[i] += log_p
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError  # `load_tasks` refuses tasks that need it

    return TrainedModel()


def flatten_results(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of lm_eval's results as `tasks/TASK/METRIC`, with `/FILTER` after it where there is one."""
    numbers = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if comma and is_number and not metric.endswith("_stderr"):
                name = metric if filter_name == "none" else f"{metric}/{filter_name}"
                numbers[f"tasks/{task}/{name}"] = float(value)
    return numbers
