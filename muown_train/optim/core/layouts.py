"""The matrices of a parameter: how a fused, convolutional, transposed or expert weight is seen as 2-D matrices.

Options of a group say how its parameters are stored:

    layout=None       a matrix (m, n): rows are outputs, columns inputs, as in nn.Linear
    layout="conv"     a convolution (out, in, k, ...), seen as the matrix (out, in k ...)
    layout="experts"  a batch (E, m, n), seen as E matrices
    transposed=True   each matrix is stored as (n, m), inputs before outputs, as in GPT-2's Conv1D
    blocks=(m1, ...)  each matrix (m, n) is several, stacked along its rows

Every matrix is a view, so a step that writes to it writes to the parameter.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..row_shards.placement import check_placements, create_meta_whole, find_row_shard, get_local, is_dtensor
from .checks import check_blocks, check_bool, check_choice, is_sequence

Group = dict[str, Any]

LAYOUTS = (None, "conv", "experts")
LAYOUT_DEFAULTS: Group = {"blocks": None, "layout": None, "transposed": False}


def split_matrices(X: Tensor, group: Group, like: Tensor | None = None) -> list[Tensor]:
    """Return the matrices (m, n) of a parameter, or of a tensor of its shape, as views into it.

    Args:
        X: a parameter of the group, its gradient, or a state of its shape.
        like: the parameter that X belongs to. Its strides give the order of a convolution's columns, which is the same
            for all tensors of the parameter whatever their memory format; None if X is the parameter.
    """
    matrices = _split_layout(X, group, X if like is None else like)
    if group["transposed"]:
        matrices = [matrix.mT for matrix in matrices]
    if blocks := group["blocks"]:
        starts = [0, *accumulate(blocks)]
        return [matrix.narrow(0, start, m) for matrix in matrices for start, m in zip(starts, blocks, strict=False)]
    return matrices


def get_local_options(group: Group) -> Group:
    """Return the options of a group for the rows of a DTensor that a rank has, whose blocks are those of the whole."""
    return group if group.get("layout") == "experts" else group | {"blocks": None}


def split_local_matrices(W: Tensor, group: Group) -> list[Tensor]:
    """Return the matrices of a parameter; of a DTensor this rank's experts, or its rows as one matrix."""
    return split_matrices(get_local(W), get_local_options(group) if is_dtensor(W) else group)


def _split_layout(X: Tensor, group: Group, like: Tensor) -> list[Tensor]:
    if group["layout"] == "experts":
        return [X.select(0, e) for e in range(X.shape[0])]
    if group["layout"] == "conv":
        # The columns are in the order of memory, so that a weight in channels_last is a view too.
        strides = like.stride()
        order = sorted(range(1, X.ndim), key=lambda axis: -strides[axis])
        columns = math.prod(X.shape[1:])  # which reshape cannot infer for a rank without rows
        return [X.permute(0, *order).reshape(X.shape[0], columns)]
    return [X]


def check_layout(name: str, W: Tensor, group: Group, kind: str) -> None:
    """Raise ValueError naming W if its shape is not what the layout says; `kind` names the optimizer.

    A DTensor must be sharded by rows of its matrices, or by experts.
    """
    if is_dtensor(W):
        check_placements(name, W)
        _check_shardable(name, W, group)
        W = create_meta_whole(W)
    layout = group["layout"]
    if layout is None and W.ndim != 2:
        advice = 'or its group layout="conv" or layout="experts"' if W.ndim > 2 else "as param_groups(model) does"
        raise ValueError(
            f"{name}: {kind} takes 2-D parameters, got {W.ndim}-D, shape {tuple(W.shape)}: give it to another "
            f"optimizer, {advice}"
        )
    if layout == "conv" and (W.ndim < 3 or group["transposed"]):
        raise ValueError(
            f'{name}: layout="conv" takes weights (out, in, k, ...) that are not transposed, got shape '
            f"{tuple(W.shape)} and transposed={group['transposed']}"
        )
    if layout == "experts" and W.ndim != 3:
        raise ValueError(f'{name}: layout="experts" takes weights (experts, m, n), got shape {tuple(W.shape)}')
    if W.numel() == 0:
        raise ValueError(f"{name}: {kind} takes matrices with elements, got shape {tuple(W.shape)}")
    matrix = _split_layout(W, group, W)[0]
    check_blocks(name, matrix.mT if group["transposed"] else matrix, group["blocks"])
    if layout == "conv" and split_matrices(W, group)[0].data_ptr() != W.data_ptr():
        raise ValueError(f"{name}: a convolution's weight must be dense in memory, got strides {W.stride()}")


def _check_shardable(name: str, W: Tensor, group: Group) -> None:
    """Raise ValueError naming the DTensor W if a rank has parts of its matrices that are no rows."""
    shard = find_row_shard(W)
    if shard is None or shard.axis is None:
        return
    if group["layout"] == "experts":
        if W.shape[0] % len(shard.bounds):
            raise ValueError(
                f"{name}: a DTensor's experts must divide among the {len(shard.bounds)} ranks, got {W.shape[0]}"
            )
    elif group["transposed"]:
        raise ValueError(
            f"{name}: a DTensor must not be transposed, since its columns are sharded, where its rows must be"
        )


def check_layout_options(group: Group) -> None:
    """Raise ValueError if an option of the layout is invalid, and make a tuple of the blocks."""
    check_choice("layout", group["layout"], LAYOUTS)
    check_bool("transposed", group["transposed"])
    if is_sequence(group["blocks"]):
        group["blocks"] = tuple(group["blocks"])
