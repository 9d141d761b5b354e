"""LoRA with Muown: adapters of a small Llama that knows one text learn another, byte by byte.

    python examples/lora.py --out runs/lora                # 60 steps
    python examples/lora.py --out runs/lora --steps 120    # 60 more: it continues from the checkpoint

The first run trains the Llama as well, for 100 steps, and saves it in OUT/base. The adapters are saved in OUT/adapter,
which PeftModel.from_pretrained loads. PEFT freezes the weights of the base, and param_groups leaves them out.
"""

import argparse
import os
from pathlib import Path

import peft
import torch
import transformers

from muown_train.optim import Combined, Muown, describe, param_groups

LR = 0.005
LENGTH = 64


def draw_rows(path, step, rows=8):
    """Return rows (rows, LENGTH) of a text, the same for each step."""
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    starts = torch.randint(len(text) - LENGTH, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + LENGTH] for start in starts]).long()


def train(model, optimizer, text, steps):
    for step in steps:
        rows = draw_rows(text, step)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}")


def make_base(folder):
    """Train all weights of a Llama on a text, and save it, as a stand-in for a model that you have."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))
    matrix, rest = param_groups(model)
    optimizer = Combined(Muown(matrix, lr=LR), torch.optim.AdamW(rest, lr=LR, weight_decay=0.0))
    train(model, optimizer, argparse.__file__, range(100))
    model.save_pretrained(folder)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--text", type=Path, default=Path(transformers.__file__))
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    if not (args.out / "base").exists():
        make_base(args.out / "base")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.out / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    matrix, _ = param_groups(model)
    # lora_B is zero at the start: zero_rows is the norm that its rows have from the first step on
    optimizer = Muown(matrix, lr=LR, zero_rows=LR)
    print(describe(optimizer))

    checkpoint, done = args.out / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        peft.set_peft_model_state_dict(model, saved["adapter"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
        print(f"continues after step {done}")
    if done >= args.steps:
        print(f"there is nothing to do: --steps {args.steps}")
        return model

    train(model, optimizer, args.text, range(done, args.steps))
    model.save_pretrained(args.out / "adapter")
    adapter = peft.get_peft_model_state_dict(model)
    saved = {"adapter": adapter, "optimizer": optimizer.state_dict(), "done": args.steps}
    torch.save(saved, checkpoint.with_suffix(".tmp"))
    os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    return model


if __name__ == "__main__":
    main()
