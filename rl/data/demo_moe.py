"""The demo as a mixture of experts: `--model demo-moe` is a tiny Qwen3-MoE that is taught rl/data/demo.py's additions in its
way.

Four layers of 8 experts, 2 of which a token goes to: as many active parameters as `--model demo`, and some 3M in all.
"""

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl.data import demo
from rl.data.demo_cache import VERSIONS

VERSION = VERSIONS["demo-moe"]


def model_dir() -> str:
    """The model's directory; trains it first if it is not there."""
    return demo.made_once("demo-moe", VERSION, _make)


def build_model(vocab_size: int) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        num_hidden_layers=4,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        **demo.SHAPE,
    )
    return Qwen3MoeForCausalLM(config)


def _make(directory: str) -> None:
    demo.make(directory, build_model)
