"""The arithmetic of an update: the numerator of MFU."""

from transformers import PretrainedConfig

from rl.learning.batch import OF_BACKWARD, Batch
from rl.model.attention import linear_layers


def flops_of_step(learner, batch: Batch, forward_only: float) -> float:
    """Return the FLOPs of a step's updates on all learners. forward_only: the part of the tokens without a backward pass."""
    flops = update_flops(learner.config, batch, frozen=bool(learner.adapters))
    if learner.policy.takes_images:
        from rl.data.image_prompts import image_sizes, tower_flops

        patches = [n for prompt in batch.distinct_prompts() for n in image_sizes(learner.config, prompt.tolist())]
        flops += tower_flops(learner.config, patches, learner.args.freeze_vision_tower)
    return flops * learner.args.ppo_epochs * (1 - forward_only * OF_BACKWARD)


def update_flops(config: PretrainedConfig, batch: Batch, frozen: bool = False) -> float:
    """Return the FLOPs of a pass, forward and backward, that computes nothing twice: each prompt once, each response token
    once, in attention each token with those before it, and in the head the trained tokens. frozen: see
    `train_flops_per_token`."""
    text = config.get_text_config()
    prompts = [len(prompt) for prompt in batch.distinct_prompts()]
    behind = list(zip(batch.prompt_lengths, batch.lengths.tolist(), strict=True))
    pairs = sum(n * (n + 1) // 2 for n in prompts) + sum(p * n + n * (n + 1) // 2 for p, n in behind)
    tokens = sum(prompts) + sum(n for _, n in behind)
    head = (4 if frozen else 6) * text.hidden_size * text.vocab_size
    unread = tokens - int(batch.sampled_lengths.sum())
    return tokens * train_flops_per_token(config, 2 * pairs / max(1, tokens), frozen) - unread * head


def train_flops_per_token(config: PretrainedConfig, mean_length: float, frozen: bool = False) -> float:
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
    mlp = 3 * hidden * width
    if experts := getattr(config, "num_experts_per_tok", None):
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        total = next((n for name in names if (n := getattr(config, name, None))), 0)
        width = experts * (getattr(config, "moe_intermediate_size", None) or width)
        width += getattr(config, "shared_expert_intermediate_size", None) or 0
        mlp = 3 * hidden * width + hidden * total  # the experts and the router
    of_nets = 0
    if nets := len(linear_layers(config)):
        from rl.model.hybrid.delta_net import flops_per_token

        of_nets = nets * flops_per_token(config)
        attention = attention + hidden * dim * heads  # which has a gate there
    attending = layers - nets
    matrices = attending * attention + layers * mlp + hidden * config.vocab_size
    return (4 if frozen else 6) * matrices + 6 * attending * heads * dim * mean_length + of_nets
