"""Counts the wasted part of an update's arithmetic: prompts computed more than once, and padding.

The minimum for a batch is each prompt once, each response token once, and in attention each token with those before it. The
actual number follows from the layouts of the micro-batches: a prompt whose responses are divided among micro-batches is in each
of them, and on a CPU attention computes it for each response, in padded buckets (rl/model/attention.py). Left out:
recomputation (--gradient-checkpointing), which is chosen, and the vision tower.
"""

import torch
from transformers import PretrainedConfig

from rl.learning.batch import Batch, MicroBatch
from rl.model.attention import linear_layers
from rl.ranks.dist import all_reduce_sum


class Computed:
    """Counts of this rank's computation in a step's updates; a token counts as one, with or without a backward pass."""

    def __init__(self):
        self.tokens = self.pairs = 0.0  # of rows; of queries and keys in one layer, of all heads
        self.forward_only = 0.0  # tokens without a backward pass

    def add(self, micro: MicroBatch) -> None:
        """Add a micro-batch. Call it after the forward pass."""
        tokens, pairs = micro.layout.work
        self.tokens, self.pairs = self.tokens + tokens, self.pairs + pairs
        self.forward_only += tokens * micro.forward_only

    def metrics(self, config: PretrainedConfig, batch: Batch, epochs: int) -> dict[str, float]:
        """Return metrics of the learners' `epochs` passes over the batch, each 0 to 1: perf/wasted_flops, the wasted part of
        the FLOPs; perf/forward_only, the part of the tokens without a backward pass. A collective."""
        own = torch.tensor([self.tokens, self.pairs, self.forward_only], dtype=torch.float64)
        tokens, pairs, forward_only = all_reduce_sum(own).tolist()
        computed = _flops(config, tokens, pairs, epochs * int(batch.sampled_lengths.sum()))
        wasted = 1 - epochs * least_flops(config, batch) / computed if computed else 0.0
        return {"perf/wasted_flops": wasted, "perf/forward_only": forward_only / max(1.0, tokens)}


def least_flops(config: PretrainedConfig, batch: Batch, frozen: bool = False) -> float:
    """Return the FLOPs of passes, forward and backward, that compute nothing twice. frozen: see `train_flops_per_token`."""
    own = [len(prompt) for prompt in batch.distinct_prompts()]
    behind = list(zip(batch.prompt_lengths(), batch.lengths.tolist(), strict=True))
    pairs = sum(n * (n + 1) // 2 for n in own) + sum(p * n + n * (n + 1) // 2 for p, n in behind)
    tokens = sum(own) + sum(n for _, n in behind)
    return _flops(config, tokens, pairs, int(batch.sampled_lengths.sum()), frozen)


def _flops(config: PretrainedConfig, tokens: float, pairs: float, projected: int, frozen: bool = False) -> float:
    """tokens: through the layers; pairs: of a query and a key; projected: tokens projected to the vocabulary."""
    text = config.get_text_config()
    head = (4 if frozen else 6) * text.hidden_size * text.vocab_size
    token = train_flops_per_token(config, 0, frozen)
    pair = train_flops_per_token(config, 2) - train_flops_per_token(config, 0)  # a token of a mean length of 2 has one pair
    return tokens * (token - head) + pairs * pair + projected * head


def train_flops_per_token(config, mean_length: float, frozen: bool = False) -> float:
    """Return the FLOP per token, forward and backward, of a Hugging Face causal LM (PaLM, arXiv 2204.02311, appendix B).

    6 per active matrix parameter (the vocabulary projection included, the embedding look-up not), and for attention
    6 * layers * heads * head_dim * mean_length: 12 in PaLM, halved because causal attention needs half of the products. Layers
    with a recurrent state instead have their own count.
    Mixture-of-experts layers count the experts a token is routed to and the shared one. Recomputation is not counted: this is
    MFU, not HFU. It is an estimate if layers differ or have no gate: all count as gated, and as mixtures if any is one. For a
    vision-language model it is the language model's part. frozen: the backward pass computes no gradient of the matrices,
    because only small adapters are trained, which are not counted.
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
    nets = len(linear_layers(config))
    of_nets = 0
    if nets:
        from rl.model.hybrid.delta_net import flops_per_token

        of_nets = nets * flops_per_token(config)
        attention = attention + hidden * dim * heads  # which has a gate there
    attending = layers - nets
    matrices = attending * attention + layers * mlp + hidden * config.vocab_size
    return (4 if frozen else 6) * matrices + 6 * attending * heads * dim * mean_length + of_nets
