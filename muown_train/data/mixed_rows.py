"""Rows of several sources as those of one run: which source a row is of, and which of the source's rows it is.

Both are a function of the number of the row, the weights and the seed. The number of rows that the run has consumed
therefore tells how far each source has been read, whatever the number of ranks and the size of batches were.

A binary tree splits the rows: of the first n that come to a node, its left branch gets floor((n a + phase) / b), where
a / b is the share of the branch in the weight of the node, and the seed chooses the phase. This differs from
n a / b by less than one row after every row, and by nothing after every b rows, since all numbers are integers. A
branch splits what it gets in the same way, and its share scales down the error that it is given. In Huffman's tree no
branch of a branch is heavier than the other branch, so two splits in a row at least halve an error, and all errors
together are less than four rows for any number of sources (1 + 1 + 1/2 + 1/2 + …), and less than one for two.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from muown_train.data.rows import Closable, RowSource, StreamedRows, StreamsVisited


@dataclass(frozen=True)
class Split:
    """A node of the tree, whose branches are further splits or names of sources."""

    left: Split | str
    right: Split | str
    share: int  # the share of the left branch is share / whole
    whole: int
    phase: int  # from 0 up to whole

    def count_left(self, rows: int) -> int:
        """Return how many of the first `rows` rows are of the left branch."""
        return (rows * self.share + self.phase) // self.whole


class Mixture:
    """The order in which rows are drawn from sources.

    Args:
        weights: positive numbers by the names of the sources, of which only the ratios count. Decimals are taken as
            they are written: 0.1 is a tenth.
        seed: decides which source has the first row, and so the row at which each gets ahead of its share.
    """

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        self.names = sorted(weights)
        nodes: list[tuple[Fraction, int, Split | str]] = [
            (Fraction(str(weights[name])), number, name) for number, name in enumerate(self.names)
        ]
        while len(nodes) > 1:
            nodes.sort(key=lambda node: node[:2])
            (light, number, left), (heavy, _, right), *nodes = nodes
            share, whole = (light / (light + heavy)).as_integer_ratio()
            digest = hashlib.blake2b(repr((seed, len(nodes), number)).encode(), digest_size=8).digest()
            phase = int.from_bytes(digest, "little") * whole >> 64
            nodes.append((light + heavy, len(self.names) + number, Split(left, right, share, whole, phase)))
        self._root = nodes[0][2]

    def locate(self, row: int) -> tuple[str, int]:
        """Return the source of a row of the run, and the number of the row among those of the source."""
        node = self._root
        while isinstance(node, Split):
            before = node.count_left(row)
            if node.count_left(row + 1) > before:
                node, row = node.left, before
            else:
                node, row = node.right, row - before
        return node, row

    def count(self, rows: int) -> dict[str, int]:
        """Return how many of the first `rows` rows of the run are of each source."""
        counts: dict[str, int] = {}
        nodes = [(self._root, rows)]
        while nodes:
            node, passed = nodes.pop()
            if isinstance(node, Split):
                left = node.count_left(passed)
                nodes += [(node.left, left), (node.right, passed - left)]
            else:
                counts[node] = passed
        return {name: counts[name] for name in self.names}


class MixedRows(RowSource):
    """Rows that are drawn from several sources, each whole from one of them.

    The state is {"sources": {name: state of the source}} of the sources that have a state. A rank reads each stream
    that it has rows of, which over time are all of them, and skips the rows of other ranks.

    Args:
        sources: rows of one length by name; each is read in the order that it has by itself.
        mixture: the order in which rows are drawn from these sources.
    """

    def __init__(self, sources: Mapping[str, RowSource], mixture: Mixture) -> None:
        self.seq_len = next(iter(sources.values())).seq_len
        self._sources = dict(sources)
        self.mixture = mixture
        self._loaded: dict[str, Any] = {}  # states of the sources as they were loaded
        self._begin = 0  # the first row of the run after that state
        self._end = 0  # one more than the largest row taken

    def take(self, indices: Sequence[int]) -> np.ndarray:
        result = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        drawn: dict[str, tuple[list[int], list[int]]] = {}  # name -> places in the result, rows of the source
        for place, index in enumerate(map(int, indices)):
            name, row = self.mixture.locate(index)
            places, rows = drawn.setdefault(name, ([], []))
            places.append(place)
            rows.append(row)
            self._end = max(self._end, index + 1)
        for name, (places, rows) in drawn.items():
            result[places] = self._sources[name].take(rows)
        return result

    def state_dict(self) -> dict[str, Any]:
        first, end = self.mixture.count(self._begin), self.mixture.count(self._end)
        states = {}
        for name, rows in self._sources.items():
            state = rows.state_dict()
            if isinstance(rows, StreamedRows) and end[name] > first[name]:
                passed = StreamsVisited(rows.streams)
                passed.add(first[name])
                passed.add(end[name] - 1)
                state = {"streams": self._drop_passed(state["streams"], name, passed)}
            states[name] = state
        return {"sources": {name: state for name, state in states.items() if state}} if any(states.values()) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state.get("sources", {})
        self._begin = self._end = state.get("rows", 0)
        counts = self.mixture.count(self._begin)
        for name, rows in self._sources.items():
            rows.load_state_dict({"rows": counts[name], **self._loaded.get(name, {})})

    def close(self) -> None:
        """End the reading, from any thread; `load_state_dict` opens the rows again."""
        for rows in self._sources.values():
            if isinstance(rows, Closable):
                rows.close()

    def replace_sources(self, function: Callable[[RowSource], RowSource]) -> MixedRows:
        """Return the same mixture of what `function` makes of each source."""
        other = copy.copy(self)
        other._sources = {name: function(rows) for name, rows in self._sources.items()}
        return other

    def _drop_passed(self, cursors: dict[str, Any], name: str, passed: StreamsVisited) -> dict[str, Any]:
        """Leave out the cursors that are still as they were loaded although the run has passed their streams since.

        Another rank has read these streams and has newer cursors. A rank may never get a row of some stream, and would
        otherwise save the cursor that it began with for ever.
        """
        loaded = self._loaded.get(name, {}).get("streams", {})
        return {key: own for key, own in cursors.items() if int(key) not in passed or own != loaded.get(key)}


def describe_draws(rows: RowSource, count: int) -> dict[str, Any]:
    """Return how many tokens a run of `count` rows draws from each source, for its manifest; {} if there is no mix."""
    if not isinstance(rows, MixedRows):
        return {}
    return {"drawn_tokens": {name: drawn * rows.seq_len for name, drawn in rows.mixture.count(count).items()}}
