"""Numbers computed from what a step did: summaries of tensors, FLOPs. docs/metrics.md explains each metric.

Left out: writing them down, which is rl/run.py, and timing, which is rl/timers.py.
"""

import math

import torch


def describe(values: torch.Tensor) -> dict[str, float]:
    """mean, max, min and std of a tensor of any shape; NaN where it is empty: rejection may leave no token at all."""
    values = values.double()
    if not values.numel():
        return dict.fromkeys(("mean", "max", "min", "std"), math.nan)
    std = values.std(correction=0)
    return {"mean": float(values.mean()), "max": float(values.max()), "min": float(values.min()), "std": float(std)}


def summarize(prefix: str, values: torch.Tensor) -> dict[str, float]:
    """{prefix/mean, prefix/max, prefix/min}, as verl reports most things."""
    return {f"{prefix}/{name}": describe(values)[name] for name in ("mean", "max", "min")}


def train_flops_per_token(config, mean_length: float) -> float:
    """FLOP of forward and backward per token of a Hugging Face causal LM (PaLM, arXiv 2204.02311, appendix B).

    6 per active matrix parameter (the vocabulary projection included, the embedding look-up not), and for attention
    6 * layers * heads * head_dim * mean_length: 12 in PaLM, halved because causal attention needs half of the products.
    Mixture-of-experts layers count the experts a token is routed to and the shared one. Recomputation is not counted: this is
    MFU, not HFU. An estimate where layers differ or have no gate: all are taken as gated, and as mixtures if any is.
    Of a vision-language model this is the language model's part.
    """
    config = config.get_text_config()
    heads, hidden, layers = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
    dim = getattr(config, "head_dim", None) or hidden // heads
    attention = hidden * dim * (2 * heads + 2 * (getattr(config, "num_key_value_heads", None) or heads))
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    if experts := getattr(config, "num_experts_per_tok", None):
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        total = next((n for name in names if (n := getattr(config, name, None))), 0)
        width = experts * (getattr(config, "moe_intermediate_size", None) or width)
        width += getattr(config, "shared_expert_intermediate_size", None) or 0
        mlp = 3 * hidden * width + hidden * total  # the experts and the router
    else:
        mlp = 3 * hidden * width
    matrices = layers * (attention + mlp) + hidden * config.vocab_size
    return 6 * matrices + 6 * layers * heads * dim * mean_length
