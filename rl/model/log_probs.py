"""Log-probs and entropy from hidden states, in chunks, because [tokens, vocabulary] is large. The logits of the first tokens
are kept for the backward pass, as many as the caller allows; the logits of the others are computed once more.

Passes over [tokens, vocabulary] take the time, so there are few: logits stay in the precision of the product, temperature and
shift are one operation, no log-softmax is written, and the gradient overwrites the logits. Autograd's own recomputation
(torch.utils.checkpoint) would repeat the entropy, and keep three tensors of a chunk instead of one.
"""

from collections.abc import Iterator

import torch

from rl.ranks.device import is_accelerator

IN_CACHE = 2**19  # logits that a CPU works on element by element at once: one pass over memory instead of four


class ChunkedLogProbs(torch.autograd.Function):
    """(hidden [n, d] with n > 0, weight [V, d], bias [V] or None, labels [n], temperature, with_entropy, elements, kept) ->
    (log-prob of the labels [n], entropy [n]) in fp32. `elements` logits at most are computed at a time, in the precision of
    hidden, and half as many in fp32; in addition at most `kept` stay until the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature: float, with_entropy: bool, elements: int, kept: int):
        log_prob, entropy, log_sum = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))  # [n] each
        ctx.rows = max(1, elements // len(weight))
        ctx.temperature = temperature
        ctx.kept = _memory(hidden, weight, kept // elements * ctx.rows)  # whole chunks: products are the same without
        buffer = _memory(hidden[len(ctx.kept) :], weight, ctx.rows)
        few = _rows_at_once(hidden, weight, ctx.rows)
        shifts, powers = (_memory(hidden, weight, few if used else 0, torch.float32) for used in (True, with_entropy))
        for chunk in _slices(0, len(hidden), ctx.rows):
            keep = chunk.stop <= len(ctx.kept)
            of_chunk = _product(ctx.kept[chunk] if keep else buffer, hidden[chunk], weight, bias)  # [c, V]
            for rows, logits in zip(_slices(chunk.start, chunk.stop, few), of_chunk.split(few), strict=True):
                top = logits.amax(-1).float() / temperature
                shifted = _shifted(shifts, logits, top, temperature)
                label = shifted.gather(1, labels[rows, None]).squeeze(1)
                power = torch.exp(shifted, out=powers[: len(shifted)]) if with_entropy else shifted.exp_()
                total = power.sum(-1)
                log_prob[rows], log_sum[rows] = label - total.log(), top + total.log()
                if with_entropy:
                    entropy[rows] = total.log() - shifted.mul_(power).sum(-1) / total
        ctx.save_for_backward(hidden, weight, bias, labels, log_prob, log_sum, entropy)
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        """grad_log_prob, grad_entropy [n], either may be None."""
        hidden, weight, bias, labels, log_prob, log_sum, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad = (torch.zeros_like(log_sum) if grad_log_prob is None else grad_log_prob) / ctx.temperature
        # If only log-probs have a gradient, it is made without its sign: |grad| p is a power, shifted by log |grad|.
        sign = torch.ones_like(grad) if grad_entropy is not None else -grad.sign()
        kept = ctx.kept
        ctx.kept = _memory(hidden, weight, 0)  # gradients overwrite it: a second backward pass has none
        buffer = _memory(hidden[len(kept) :], weight, ctx.rows)
        few = _rows_at_once(hidden, weight, ctx.rows)
        powers = _memory(hidden, weight, few if grad_entropy is not None else 0, torch.float32)
        shifts = None if hidden.dtype == torch.float32 else _memory(hidden, weight, few, torch.float32)
        for chunk in (*_slices(0, len(kept), len(kept)), *_slices(len(kept), len(hidden), ctx.rows)):
            is_kept = chunk.stop <= len(kept)
            of_chunk = kept[chunk] if is_kept else _product(buffer, hidden[chunk], weight, bias)  # [c, V]
            for rows, logits in zip(_slices(chunk.start, chunk.stop, few), of_chunk.split(few), strict=True):
                label = labels[rows, None], log_prob[rows, None], grad[rows, None]
                if grad_entropy is None:
                    _gradient_of_log_prob(shifts, logits, log_sum[rows], *label, ctx.temperature)
                else:
                    of_entropy = entropy[rows, None], grad_entropy[rows, None] / ctx.temperature
                    _gradient(shifts, powers, logits, log_sum[rows], *label, *of_entropy, ctx.temperature)
            signed = sign[chunk, None].to(hidden.dtype)
            torch.mm(of_chunk, weight, out=grad_hidden[chunk]).mul_(signed)
            if grad_weight is None:  # the model is frozen
                pass
            elif chunk.start:
                grad_weight.addmm_(of_chunk.t(), hidden[chunk] * signed)
            else:
                torch.mm(of_chunk.t(), hidden[chunk] * signed, out=grad_weight)
            if bias is not None:
                grad_bias += (of_chunk.t() @ signed).squeeze(1)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _gradient_of_log_prob(memory, logits, log_sum, labels, log_prob, grad, temperature: float) -> None:
    """Overwrites the logits [c, V] by |grad| (p - onehot(y)). log_sum [c]; labels, log_prob and grad [c, 1]."""
    size = grad.abs()
    logits.copy_(_shifted(memory, logits, log_sum - size.squeeze(1).log(), temperature).exp_())
    logits.scatter_(1, labels, (size * torch.expm1(log_prob)).to(logits.dtype))


def _gradient(memory, powers, logits, log_sum, labels, log_prob, grad, entropy, grad_entropy, temperature: float) -> None:
    """Overwrites the logits [c, V] by grad (onehot(y) - p) - grad_entropy p (log p + H). log_sum [c]; the others [c, 1]."""
    log_probs = _shifted(memory, logits, log_sum, temperature)
    power = torch.exp(log_probs, out=powers[: len(logits)])
    factor = torch.addcmul(-grad - grad_entropy * entropy, log_probs, -grad_entropy, out=log_probs)
    logits.copy_(power.mul_(factor))
    of_label = -grad * torch.expm1(log_prob) - grad_entropy * log_prob.exp() * (log_prob + entropy)
    logits.scatter_(1, labels, of_label.to(logits.dtype))


def _shifted(memory: torch.Tensor | None, logits: torch.Tensor, shift: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits [c, V] over the temperature, less shift [c], fp32, in that memory or, without any, in place."""
    out = logits if memory is None else memory[: len(logits)]
    return torch.add(-shift[:, None], logits, alpha=1 / temperature, out=out)


def _memory(hidden: torch.Tensor, weight: torch.Tensor, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[`rows`, at most as many as hidden has, V], for several chunks one after the other: fresh memory of this size costs a CPU
    a page fault for every 4 KB. dtype: by default that of hidden."""
    return torch.empty(min(rows, len(hidden)), len(weight), dtype=dtype or hidden.dtype, device=hidden.device)


def _rows_at_once(hidden: torch.Tensor, weight: torch.Tensor, most: int) -> int:
    """Rows of logits for one elementwise operation."""
    return max(1, most // 4 if is_accelerator(hidden.device) else min(most, IN_CACHE // len(weight)))


def _product(memory: torch.Tensor, hidden: torch.Tensor, weight, bias) -> torch.Tensor:
    """hidden [c, d] -> logits [c, V], in that memory."""
    out = memory[: len(hidden)]
    return torch.mm(hidden, weight.t(), out=out) if bias is None else torch.addmm(bias, hidden, weight.t(), out=out)


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(stop, first + size)) for first in range(start, stop, max(1, size)))
