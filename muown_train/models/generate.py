"""Text from a model by plain sampling; every token runs the whole context again (short samples, no cache)."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module, prompt: list[int], count: int, seq_len: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """Continue `prompt` by `count` token ids.

    Args:
        model: maps (1, T) token ids to logits (1, T, vocabulary).
        seq_len: longest context that the model takes; older tokens fall out.
        temperature: 0 takes the most likely token each time.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(count):
        context = torch.tensor([ids[-seq_len:]], device=device)
        logits: Tensor = model(context)[0, -1].float().cpu()
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            ids.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)))
    return ids[len(prompt) :]
