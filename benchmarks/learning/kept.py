"""What the learner's decoder layers keep for the backward pass, and what autograd alone would: bytes counted, not measured.

    python benchmarks/learning/kept.py        # half a minute; writes benchmarks/results/kept.{json,md}

Layers of real sizes with random weights over a packed row: two prompts of 100 tokens, each with eight responses of 200. Each
storage that is saved for the backward pass counts once, parameters not. On a CPU, thus with what its attention gathers; where a
device has its own attention over packed rows both sides keep less of that. Of an MLP more is kept where its products are small
(`WORTH_IT` in rl/model/lean_layers.py), which these are not.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from common import RESULTS, setting, table, words, write
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModel

from rl.model.attention import ATTENTION, Packed
from rl.model.lean_layers import keep_less

SHAPES = {  # family, hidden, inner size, heads, heads of keys and values, size of a head
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 14, 2, 64),
    "Qwen3-8B": ("qwen3", 4096, 12288, 32, 8, 128),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 8, 128),
}


@dataclass
class Args:
    shapes: tuple[str, ...] = tuple(SHAPES)
    """Which of them."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


def packed() -> Packed:
    prompt = [100, *[200] * 8]
    return Packed(prompt * 2, after=[-1, *[0] * 8, -1, *[9] * 8])


def kept(model, layout: Packed) -> float:
    """Bytes for a token of the packed row, of one layer's forward pass, over the hidden size."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return tensor

    layer, hidden = model.layers[0], model.config.hidden_size
    x = torch.randn(1, layout.tokens, hidden, dtype=layer.input_layernorm.weight.dtype, requires_grad=True)
    angles = model.rotary_emb(x, layout.position_ids[None])
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, position_embeddings=angles, layout=layout)
    bytes_held = sum(t.untyped_storage().nbytes() for pointer, t in held.items() if pointer not in own)
    return bytes_held / layout.tokens / hidden


def measure(shape: str) -> list[dict]:
    """By precision: {"dtype", "autograd", "ours"}."""
    family, hidden, inner, heads, kv_heads, size = SHAPES[shape]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = AutoConfig.for_model(family, **sizes, head_dim=size, vocab_size=32, num_hidden_layers=1)
    config._attn_implementation = ATTENTION
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModel.from_config(config).to(dtype)
        by_autograd = kept(model, packed())
        keep_less(model)
        out.append({"dtype": str(dtype).removeprefix("torch."), "autograd": by_autograd, "ours": kept(model, packed())})
    return out


def rows(shape: str, found: list[dict]) -> list[list[str]]:
    numbers = lambda r: [f"{r['autograd']:.1f}", f"{r['ours']:.1f}", f"{r['ours'] / r['autograd']:.2f}"]  # noqa: E731
    return [[shape, r["dtype"], *numbers(r)] for r in found]


def main(args: Args) -> None:
    results = {shape: measure(shape) for shape in args.shapes}
    lines = [row for shape, found in results.items() for row in rows(shape, found)]
    made = table(["layer", "precision", "autograd alone", "ours", "ratio"], lines)
    here = setting("transformers")
    write("kept", {"setting": here, "shapes": results}, f"{made}\n\n{words(here)}", args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
