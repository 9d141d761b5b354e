"""What a model keeps of the tokens that it has read, so that the next ones need not read them again."""

import torch
import torch.nn.functional as F
from torch import Tensor


class KeyValueCache:
    """Keys and values of all positions so far, of each layer; those of a forward pass are added to it."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Positions of the forward passes before; to be asked for before layer 0 adds its own."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values (B, h, T, d) of T further positions; all (B, h, P + T, d) are given back."""
        if layer in self.layers:
            before_k, before_v = self.layers[layer]
            k, v = torch.cat((before_k, k), dim=2), torch.cat((before_v, v), dim=2)
        self.layers[layer] = k, v
        return k, v


def attention_after(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention of the last T positions, each to the keys up to its own: q (B, h, T, d); k, v (B, h, P + T, d).

    Args:
        scale: of q k^T; by default 1 / sqrt(d).
    """
    T, all_positions = q.shape[2], k.shape[2]
    mask = None if T == 1 else torch.ones(T, all_positions, dtype=torch.bool, device=q.device).tril(all_positions - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
