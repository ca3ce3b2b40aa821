"""The policy: a causal language model whose forward returns the log-probs and entropy that losses need."""

import torch
from torch import nn

from rl.data.image_prompts import takes_images
from rl.model import vision_forward
from rl.model.attention import linear_layers
from rl.model.head.log_probs import ChunkedLogProbs, log_probs_at, top_tokens
from rl.model.head.precision import Fp32Head
from rl.model.router import Router

LOGITS_AT_ONCE = 2**26  # elements of [tokens, vocabulary] computed at a time: 256 MB in fp32
LOGITS_KEPT = 2**28  # elements kept for a micro-batch's backward pass: 1 GB in fp32; the logits of other tokens are made twice


class Policy(nn.Module):
    """A causal language model over packed rows. It holds [tokens, vocabulary] only where that is small."""

    def __init__(self, model: nn.Module, router: Router | None = None, logits_kept: int = LOGITS_KEPT):
        super().__init__()
        self.model = model
        self.router = router
        self.takes_images = takes_images(model.config)
        self.logits_kept = logits_kept
        self.adapters = None  # of rl/adapters/lora.py, where the model has some
        self.head_fp32 = False  # --lm-head-fp32
        if self.takes_images:
            vision_forward.embed_by_product(model)
        if linear_layers(model.config):
            from rl.model.hybrid.delta_net import carry_states

            carry_states(model)

    def forward(
        self, inputs: dict, layout, predict, labels, temperature: float, entropy: str, routes=None, observe=0, top=None
    ):
        """The model's inputs, predict [n], labels [n] or [n, m] -> (log-prob of the labels, in their shape, entropy [n]), fp32.

        entropy: "none" returns zeros, "metric" the value without gradient, "loss" the value with it. top = (K, vocabulary):
        returns the result of `top_tokens`. routes, observe: see rl/model/router.py.
        """
        if self.router:
            self.router.begin(layout, routes, observe)
        hidden = self._hidden(inputs, layout)[predict]  # [n, hidden]
        head = self.model.lm_head
        if self.head_fp32 and hidden.dtype != torch.float32:
            hidden = hidden.float()
            head = Fp32Head.of(head)
        if top:
            return top_tokens(hidden, head, labels, temperature, *top, LOGITS_AT_ONCE)
        if labels.dim() > 1 or len(hidden) * len(head.weight) <= LOGITS_AT_ONCE:
            return log_probs_at(hidden, head, labels, temperature, entropy, LOGITS_AT_ONCE)
        kept = self.logits_kept if torch.is_grad_enabled() else 0
        log_prob, entropies = ChunkedLogProbs.apply(
            hidden, head.weight, head.bias, labels, temperature, entropy != "none", LOGITS_AT_ONCE, kept
        )
        return log_prob, entropies if entropy == "loss" else entropies.detach()

    def reshard(self) -> None:
        """Frees the parameters that FSDP has gathered. FSDP replaces this method; without it there is nothing to free."""

    def _hidden(self, inputs: dict, layout) -> torch.Tensor:
        """[T, hidden]"""
        if self.takes_images:
            return vision_forward.hidden_states(self.model.model, layout, **inputs)
        return self.model.model(**inputs, use_cache=False, layout=layout)[0][0]
