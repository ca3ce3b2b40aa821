"""Log-probs of several tokens at each place: a teacher's likeliest, and the policy's at those (--teacher-top-k)."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def top_tokens(
    hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor, temperature: float, count: int, below: int, elements: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [n, d], labels [n] -> (log-prob of the labels [n], the `count` likeliest tokens [n, count] of those with numbers
    `below` this, their log-probs [n, count]), fp32. `elements` logits are computed at a time. No gradient."""
    found = []
    for part, its_labels in _chunks(hidden, head, labels, elements):
        log_probs = _log_softmax(part, head, temperature)
        values, tokens = log_probs[:, :below].topk(count, -1)
        found.append((log_probs.gather(1, its_labels[:, None]).squeeze(1), tokens, values))
    sampled, tokens, values = (torch.cat(parts) for parts in zip(*found, strict=True))
    return sampled, tokens, values


def log_probs_at(
    hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor, temperature: float, entropy: str, elements: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [n, d], labels [n, m] -> (log-prob of the labels [n, m], entropy [n] as rl/model/policy.py has it), fp32. More
    logits than `elements` are computed in chunks, and once more in the backward pass."""

    def of_part(part: torch.Tensor, its_labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = _log_softmax(part, head, temperature)
        chosen = log_probs.gather(1, its_labels)
        if entropy == "none":
            return chosen, chosen.new_zeros(len(chosen))
        with torch.set_grad_enabled(entropy == "loss" and torch.is_grad_enabled()):
            return chosen, -(log_probs.exp() * log_probs).sum(-1)

    chunks = _chunks(hidden, head, labels, elements)
    if len(chunks) == 1:
        return of_part(hidden, labels)
    log_prob, entropies = zip(*(checkpoint(of_part, *chunk, use_reentrant=False) for chunk in chunks), strict=True)
    return torch.cat(log_prob), torch.cat(entropies)


def _chunks(
    hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor, elements: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = max(1, elements // len(head.weight))
    return list(zip(hidden.split(rows), labels.split(rows), strict=True))


def _log_softmax(hidden: torch.Tensor, head: nn.Linear, temperature: float) -> torch.Tensor:
    return (head(hidden).float() / temperature).log_softmax(-1)
