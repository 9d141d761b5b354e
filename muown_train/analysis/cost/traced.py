"""What autograd keeps of a model of any architecture, from one forward pass without numbers.

The pass is of tensors that have a size and nothing else (`FakeTensorMode`), on a CPU and not compiled. A GPU keeps no
more than that, and less where it has one operation for several; a compiled model keeps less.
"""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from muown_train.models.language_model import LanguageModel


@dataclass(frozen=True)
class Kept:
    """Bytes: fixed + rows of a micro-batch * per_row."""

    fixed: int
    per_row: int


def kept_by(model: LanguageModel, seq_len: int, autocast: bool) -> Kept:
    """What is kept for the backward pass besides weights, buffers and the head's gradients, made with the loss.

    Args:
        model: on any device, as the meta device.
        seq_len: tokens T of a row; autocast: whether products are in 2 bytes.
    """
    one, two = (_kept(model, rows, seq_len, autocast) for rows in (1, 2))
    of_weight = 4 * model.vocab_size * model.dim
    of_input = (2 if autocast else 4) * seq_len * model.dim
    return Kept(2 * one - two - of_weight, two - one - of_input)


def _kept(model: LanguageModel, rows: int, seq_len: int, autocast: bool) -> int:
    storages: dict[int, torch.UntypedStorage] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        storages[storage._cdata] = storage
        return saved

    # float16 is as wide as bfloat16, in which attention on a CPU would take blocks and keep their probabilities
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.float16, enabled=autocast):
        tensors = {
            name: torch.empty_like(tensor, device="cpu", requires_grad=tensor.requires_grad)
            for name, tensor in chain(model.named_parameters(), model.named_buffers())
        }
        tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            # named, so that it lives until all has been counted
            loss = functional_call(model, tensors, (tokens, tokens))
        own = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
        kept = sum(storage.nbytes() for place, storage in storages.items() if place not in own)
        del loss
    return kept
