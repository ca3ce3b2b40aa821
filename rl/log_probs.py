"""Log-probs and entropy from hidden states when [tokens, vocabulary] is too large to hold: in chunks, logits made once more for
the backward. rl/policy.py takes it for what does not fit into one chunk.

Autograd's own recomputation (torch.utils.checkpoint) would also repeat the entropy and the softmax's passes over memory, and
keep three tensors of a chunk where one does: the gradient of log p_y with respect to the logits is onehot(y) - p.
"""

import torch
import torch.nn.functional as F


class ChunkedLogProbs(torch.autograd.Function):
    """(hidden [n, d], weight [V, d], bias [V] or None, labels [n], temperature, with_entropy, elements) -> (log-prob of the
    labels [n], entropy [n]) in fp32. At most `elements` logits are held in fp32 at a time, and as many in a lower precision."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature: float, with_entropy: bool, elements: int):
        log_prob, entropy, scale = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))  # [n] each
        ctx.rows = max(1, elements // len(weight))
        at_once = max(1, ctx.rows // 2)  # two tensors
        buffer, of_log_probs = (_buffer(hidden, weight, at_once) for _ in range(2))
        for rows in _chunks(len(hidden), at_once):
            logits = _logits(buffer, hidden[rows], weight, bias, temperature)  # [c, V]
            log_probs = torch.log_softmax(logits, -1, out=of_log_probs[: len(logits)])
            log_prob[rows] = log_probs.gather(1, labels[rows, None]).squeeze(1)
            scale[rows] = logits.gather(1, labels[rows, None]).squeeze(1) - log_prob[rows]  # log of the softmax's denominator
            if with_entropy:
                entropy[rows] = -torch.exp(log_probs, out=logits).mul_(log_probs).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, scale, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):
        """grad_log_prob, grad_entropy [n]. d log p_y / d logits = onehot(y) - p; d H / d logits = -p * (log p + H)."""
        hidden, weight, bias, labels, scale, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        through_entropy = grad_entropy is not None
        grad_log_prob = torch.zeros_like(scale) if grad_log_prob is None else grad_log_prob
        at_once = max(1, ctx.rows // (2 if through_entropy else 1))
        buffer = _buffer(hidden, weight, at_once)
        for rows in _chunks(len(hidden), at_once):
            g = grad_log_prob[rows, None]  # [c, 1]
            log_probs = _logits(buffer, hidden[rows], weight, bias, ctx.temperature).sub_(scale[rows, None])  # [c, V]
            if through_entropy:
                factor = (log_probs + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(g)
                grad_logits = log_probs.exp_().mul_(factor).neg_()
                del factor
            else:
                grad_logits = log_probs.exp_().mul_(-g)
            grad_logits.scatter_add_(1, labels[rows, None], g)
            if ctx.temperature != 1:
                grad_logits.div_(ctx.temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            grad_weight.addmm_(grad_logits.t(), hidden[rows])
            if bias is not None:
                grad_bias += grad_logits.sum(0)
            del grad_logits
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _buffer(hidden: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """One buffer [rows, V] for all chunks: fresh memory of this size costs a CPU a page fault for every 4 KB."""
    return torch.empty(min(rows, len(hidden)), len(weight), dtype=torch.float32, device=hidden.device)


def _logits(buffer: torch.Tensor, hidden: torch.Tensor, weight, bias, temperature: float) -> torch.Tensor:
    """hidden [c, d] -> logits over the temperature [c, V], fp32, in the buffer."""
    out = buffer[: len(hidden)]
    if hidden.dtype == torch.float32 and bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(F.linear(hidden, weight, bias))
    return out if temperature == 1 else out.div_(temperature)


def _chunks(n: int, size: int):
    return (slice(start, min(n, start + size)) for start in range(0, n, size))
