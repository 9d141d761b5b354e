"""Changes to stored checkpoints, with the digest that belongs to them, as a stranger would make them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muown_train.runs.checkpoint_files import encode_index, parse_step


def rewrite_index(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change an index.json in place by a function of the index."""
    index = json.loads(path.read_text())
    index.pop("sha256", None)
    change(index)
    path.write_bytes(encode_index(index))


def take_new_step(checkpoint: Path) -> None:
    """Make a checkpoint that was copied to another name one of the step that its name says."""
    step, rank = parse_step(checkpoint), checkpoint / "rank-00000.json"
    rank.write_text(json.dumps(json.loads(rank.read_text()) | {"trainer/step": step}))
    file = {"bytes": rank.stat().st_size, "sha256": hashlib.sha256(rank.read_bytes()).hexdigest()}
    rewrite_index(
        checkpoint / "index.json", lambda index: index.update(step=step, files=index["files"] | {rank.name: file})
    )
