"""Log-probs and entropy from hidden states where [tokens, vocabulary] is large: in chunks. Of the first tokens the log-softmax
is kept for the backward pass, as much as the caller allows; of the others logits are made once more. rl/model/policy.py takes
it for what does not fit into one chunk.

Autograd's own recomputation (torch.utils.checkpoint) would also repeat the entropy and the softmax's passes over memory, and
keep three tensors of a chunk where one does: the gradient of log p_y with respect to the logits is onehot(y) - p.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from rl.ranks.device import is_accelerator

IN_CACHE = 2**19  # logits that a CPU works on element by element at once: one pass over memory instead of four


class ChunkedLogProbs(torch.autograd.Function):
    """(hidden [n, d] with n > 0, weight [V, d], bias [V] or None, labels [n], temperature, with_entropy, elements, kept) ->
    (log-prob of the labels [n], entropy [n]) in fp32. `elements` logits at most are computed at a time in fp32, and as many in
    a lower precision; in addition at most `kept` stay until the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature: float, with_entropy: bool, elements: int, kept: int):
        log_prob, entropy, scale = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))  # [n] each
        ctx.rows, ctx.temperature = max(1, elements // len(weight)), temperature
        ctx.kept = _memory(hidden, weight, kept // elements * ctx.rows)  # whole chunks: products are the same without
        buffer = _memory(hidden[len(ctx.kept) :], weight, ctx.rows)
        few = _rows_at_once(hidden, weight, ctx.rows)
        scratch = _memory(hidden, weight, few)
        for chunk in _slices(0, len(hidden), ctx.rows):
            keep = chunk.stop <= len(ctx.kept)
            of_chunk = _logits(ctx.kept[chunk] if keep else buffer, hidden[chunk], weight, bias, temperature)  # [c, V]
            for rows, logits in zip(_slices(chunk.start, chunk.stop, few), of_chunk.split(few), strict=True):
                log_probs = torch.log_softmax(logits, -1, out=scratch[: len(logits)])
                log_prob[rows] = log_probs.gather(1, labels[rows, None]).squeeze(1)
                scale[rows] = logits.gather(1, labels[rows, None]).squeeze(1) - log_prob[rows]  # log of the denominator
                if with_entropy:
                    entropy[rows] = -torch.exp(log_probs, out=logits).mul_(log_probs).sum(-1)
                if keep:
                    logits.copy_(log_probs)
        ctx.save_for_backward(hidden, weight, bias, labels, scale, entropy)
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        """grad_log_prob, grad_entropy [n]. d log p_y / d logits = onehot(y) - p; d H / d logits = -p * (log p + H)."""
        hidden, weight, bias, labels, scale, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_log_prob = torch.zeros_like(scale) if grad_log_prob is None else grad_log_prob
        kept, ctx.kept = ctx.kept, _memory(hidden, weight, 0)  # gradients take its place: a second backward pass has none
        buffer = _memory(hidden[len(kept) :], weight, ctx.rows)
        few = _rows_at_once(hidden, weight, ctx.rows)
        # What is kept is one product, unless it had to be copied into another precision for it.
        of_kept = _slices(0, len(kept), len(kept) if hidden.dtype == torch.float32 else ctx.rows)
        for chunk in (*of_kept, *_slices(len(kept), len(hidden), ctx.rows)):
            if chunk.stop <= len(kept):
                grad_logits = kept[chunk]  # [c, V], log-probs as yet
            else:
                grad_logits = _logits(buffer, hidden[chunk], weight, bias, ctx.temperature).sub_(scale[chunk, None])
            for rows, log_probs in zip(_slices(chunk.start, chunk.stop, few), grad_logits.split(few), strict=True):
                g = grad_log_prob[rows, None]  # [few, 1]
                if grad_entropy is None:
                    log_probs.exp_().mul_(-g)
                else:
                    factor = (log_probs + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(g)
                    log_probs.exp_().mul_(factor).neg_()
                log_probs.scatter_add_(1, labels[rows, None], g)
                if ctx.temperature != 1:
                    log_probs.div_(ctx.temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is None:  # the model is frozen
                pass
            elif chunk.start:
                grad_weight.addmm_(grad_logits.t(), hidden[chunk])
            else:
                torch.mm(grad_logits.t(), hidden[chunk], out=grad_weight)
            if bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _memory(hidden: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """[`rows`, or as many as hidden has, V] fp32, for several chunks one after the other: fresh memory of this size costs a CPU
    a page fault for every 4 KB."""
    return torch.empty(min(rows, len(hidden)), len(weight), dtype=torch.float32, device=hidden.device)


def _rows_at_once(hidden: torch.Tensor, weight: torch.Tensor, most: int) -> int:
    """Rows of logits for one operation that goes element by element."""
    return max(1, most // 2 if is_accelerator(hidden.device) else min(most, IN_CACHE // len(weight)))


def _logits(memory: torch.Tensor, hidden: torch.Tensor, weight, bias, temperature: float) -> torch.Tensor:
    """hidden [c, d] -> logits over the temperature [c, V], fp32, in that memory."""
    out = memory[: len(hidden)]
    if hidden.dtype == torch.float32 and bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(F.linear(hidden, weight, bias))
    return out if temperature == 1 else out.div_(temperature)


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(stop, first + size)) for first in range(start, stop, max(1, size)))
