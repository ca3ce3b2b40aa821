"""The policy: a causal language model whose forward returns the log-probs and entropy that losses need. And a check that this
forward pass computes what transformers computes.

The learner packs sequences into one row, shares prompts, replaces attention and stops before the logits. A model that does
anything else (scales or caps its logits, has sinks, or a state that crosses the borders of a row) would be trained and sampled
wrongly, and no metric would show it, because generators compute in the same way. So at a learner's start the first rank sends
two random prompts with two responses each through the model as transformers runs it, in fp32 on the CPU, and through our code.
Left out of the check: images, whose families the tests know, and differences that only longer sequences show:
rl/model/attention.py refuses these by the config and by the options of each layer's attention.
"""

import contextlib
import functools
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl.errors import UserError
from rl.model.attention import ATTENTION, REMEDY, Packed, linear_layers
from rl.model.pretrained import has_experts, takes_images

LOGITS_AT_ONCE = 2**26  # elements of [tokens, vocabulary] computed at a time: 256 MB in fp32
LOGITS_KEPT = 2**28  # elements kept for a micro-batch's backward pass: 1 GB in fp32; the logits of other tokens are made twice
TOKENS = 8  # of each prompt and each response of the check
# Largest differences of log-probs in the check: the median of a response, and a token. Wrong models differ by 0.1 to 5.
# Rounding causes 1e-6, but may send a token of a mixture to a different expert: a token counts if it differs for both prompts.
OF_RESPONSE, OF_TOKEN = 1e-3, 1e-2
MANY = 10**8  # parameters, from which on a check by all cores is faster than by one


class Policy(nn.Module):
    """A causal language model over packed rows. It holds [tokens, vocabulary] only where that is small."""

    router = None  # of rl/model/router.py, in a mixture of experts
    adapters = None  # of rl/learning/adapters.py, where the model has some

    def __init__(self, model: nn.Module, logits_kept: int = LOGITS_KEPT):
        super().__init__()
        self.model = model
        self.takes_images = takes_images(model.config)
        self.logits_kept = logits_kept
        if has_experts(model.config):
            from rl.model.router import Router  # late, as is all that a dense model of text does without

            self.router = Router.of(model)
        if self.takes_images:
            from rl.model.vision_forward import embed_by_product

            embed_by_product(model)
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
        hidden = self._hidden(inputs, layout, predict)
        head = self.model.lm_head
        if top:
            return top_tokens(hidden, head, labels, temperature, *top)
        if labels.dim() > 1 or len(hidden) * len(head.weight) <= LOGITS_AT_ONCE:
            return log_probs_at(hidden, head, labels, temperature, entropy)
        from rl.model.log_probs import ChunkedLogProbs  # late: small vocabularies do without

        kept = self.logits_kept if torch.is_grad_enabled() else 0
        log_prob, entropies = ChunkedLogProbs.apply(
            hidden, head.weight, head.bias, labels, temperature, entropy != "none", LOGITS_AT_ONCE, kept
        )
        return log_prob, entropies if entropy == "loss" else entropies.detach()

    def reshard(self) -> None:
        """Free the parameters that FSDP has gathered. FSDP replaces this method; without it there is nothing to free."""

    def _hidden(self, inputs: dict, layout, predict) -> Tensor:
        """Return the hidden states that predict the tokens, [n, hidden]. A prompt's last one predicts the first token of each
        response: with `[predict]`, the backward pass of a CPU would add their gradients in the order in which threads come."""
        if self.takes_images:
            from rl.model.vision_forward import hidden_states

            row = hidden_states(self.model.model, layout, **inputs)
        else:
            row = self.model.model(**inputs, use_cache=False, layout=layout)[0][0]
        return F.embedding(predict, row)


def top_tokens(
    hidden: Tensor, head: nn.Linear, labels: Tensor, temperature: float, count: int, below: int
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [n, d], labels [n] -> (log-prob of the labels [n], the `count` likeliest tokens [n, count] among those numbered
    below `below`, their log-probs [n, count]), fp32. No gradient."""

    def of_part(part: Tensor, its_labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = _log_softmax(part, head, temperature)
        values, tokens = log_probs[:, :below].topk(count, -1)
        return log_probs.gather(1, its_labels[:, None]).squeeze(1), tokens, values

    return _by_chunks(of_part, hidden, head, labels)


def log_probs_at(hidden: Tensor, head: nn.Linear, labels: Tensor, temperature: float, entropy: str) -> tuple[Tensor, Tensor]:
    """hidden [n, d], labels [n] or [n, m] -> (log-prob of the labels, in their shape, entropy [n] as in `forward`), fp32.
    More logits than LOGITS_AT_ONCE are computed in chunks, and once more in the backward pass."""

    def of_part(part: Tensor, its_labels: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = _log_softmax(part, head, temperature)
        one_each = its_labels.dim() == 1
        chosen = -F.nll_loss(log_probs, its_labels, reduction="none") if one_each else log_probs.gather(1, its_labels)
        if entropy == "none":
            return chosen, chosen.new_zeros(len(chosen))
        with torch.set_grad_enabled(entropy == "loss" and torch.is_grad_enabled()):
            return chosen, -(log_probs.exp() * log_probs).sum(-1)

    if len(hidden) * len(head.weight) <= LOGITS_AT_ONCE:
        return of_part(hidden, labels)
    return _by_chunks(functools.partial(checkpoint, of_part, use_reentrant=False), hidden, head, labels)


def _by_chunks(of_part: Callable, hidden: Tensor, head: nn.Linear, labels: Tensor) -> tuple:
    rows = max(1, LOGITS_AT_ONCE // len(head.weight))
    found = map(of_part, hidden.split(rows), labels.split(rows))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _log_softmax(hidden: Tensor, head: nn.Linear, temperature: float) -> Tensor:
    return (head(hidden).float() / temperature).log_softmax(-1)


# ------------------------------------------------------------------------------------------------------ the check at the start


@torch.no_grad()
def check_policy(policy, path: str, name: str = "--model") -> None:
    """Raise UserError if log-probs of the policy, in fp32 on the CPU, are not those of transformers. name: of the flag."""
    model = policy.model
    where = f"{name} {path}"
    generator = torch.Generator().manual_seed(0)  # a run's own numbers stay
    prompts, responses = (torch.randint(256, (2, n, TOKENS), generator=generator) for n in (1, 2))  # [prompt, number, token]
    special = getattr(model.config, "image_token_id", None), getattr(model.config, "video_token_id", None)
    size = min(256, model.config.get_text_config().vocab_size, *(token for token in special if token is not None))
    prompts, responses = prompts % size, responses % size
    layout = Packed([TOKENS] * 6, after=[-1, 0, 0, -1, 3, 3])  # a prompt, its two responses, the other prompt, ...
    inputs = layout.inputs(torch.cat([prompts, responses], 1).flatten())
    if policy.takes_images:
        inputs |= {"position_ids": layout.position_ids.expand(3, 1, -1), "images": None}
    predict = torch.stack([s[TOKENS - 1 : -1] for s in layout.gather_index.split(layout.lengths)])  # [4, TOKENS]
    threads = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) >= MANY:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchrun leaves each rank one thread, and the others wait
    try:
        found = policy(inputs, layout, predict.flatten(), responses.flatten(), 1.0, "none")[0]
        expected = _by_transformers(model, torch.cat([prompts.expand(-1, 2, -1), responses], 2).flatten(0, 1))
    except UserError as error:  # from rl/model/attention.py, which knows no model; or from rl/model/loading.py
        raise error if where in str(error) else UserError(f"{where}: {error}") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # anything: the model may take other arguments or have other shapes
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{where}: {type(model).__name__} cannot be run on packed sequences ({reason}). {REMEDY}") from error
    finally:
        torch.set_num_threads(threads)
    gaps = (found.view(2, 2, TOKENS) - expected.view(2, 2, TOKENS)).abs()
    of_response, of_token = float(gaps.median(-1).values.max()), float(gaps.amin(0).max())
    if not (of_response <= OF_RESPONSE and of_token <= OF_TOKEN):  # also true for NaN
        raise UserError(
            f"{where}: log-probs computed here differ from transformers' by {max(of_response, of_token):.2g}: the model does "
            f"more than is computed here, or something reaches from one sequence of a packed row into the next. {REMEDY}"
        )


def _by_transformers(model, ids: Tensor) -> Tensor:
    """Return the log-probs [4, TOKENS] of the second halves of ids [4, 2 * TOKENS], by transformers' own attention."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values()
    ours = [config for config in configs if getattr(config, "_attn_implementation", None) == ATTENTION]
    for config in ours:
        config._attn_implementation = "eager"
    plain = contextlib.nullcontext()
    if linear_layers(model.config):
        from rl.model.hybrid.delta_net import in_plain_torch

        plain = in_plain_torch(model)
    try:
        with plain:
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for config in ours:
            config._attn_implementation = ATTENTION
    return logits[:, TOKENS - 1 : -1].float().log_softmax(-1).gather(2, ids[:, TOKENS:, None]).squeeze(2)
