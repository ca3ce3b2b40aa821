"""The demo of a hybrid model: `--model demo-hybrid` is a tiny Qwen3.5 that is taught rl/data/demo.py's additions in its way.

A layer is a gated delta net and one attends, some 0.5M parameters. The heads of the states have 128 elements, so that
vLLM computes them on a CPU, too (with --rollout-dtype bfloat16).
"""

from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from rl.data import demo
from rl.data.demo_cache import VERSIONS

VERSION = VERSIONS["demo-hybrid"]


def model_dir() -> str:
    """The model's directory; trains it first if it is not there."""
    return demo.made_once("demo-hybrid", VERSION, _make)


def build_model(vocab_size: int) -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        head_dim=32,
        intermediate_size=512,
        **demo.SHAPE,
    )
    return Qwen3_5ForCausalLM(config)


def _make(directory: str) -> None:
    demo.make(directory, build_model)
