"""A teacher's most likely tokens at each place of a micro-batch (--teacher-top-k), and the policy's log-probs of the same."""

from dataclasses import dataclass

import torch


@dataclass
class TopTokens:
    """K tokens for each of the n response tokens of a micro-batch."""

    token: torch.Tensor  # [n, K] int32, in host memory
    of_teacher: torch.Tensor  # [n, K] float32, its log-probs, in host memory
    log_prob: torch.Tensor | None = None  # [n, K] float32, of the policy's last forward pass, with gradient

    @property
    def log_probs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's and the teacher's, [n, K] each, on the policy's device."""
        return self.log_prob, self.of_teacher.to(self.log_prob.device)

    def labels(self, sampled: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        """[m, 1 + K]: the sampled tokens [m] and those here. own: which of the n places the m are; None for all."""
        token = self.token.to(sampled.device, torch.long)
        return torch.cat([sampled[:, None], token if own is None else token[own]], 1)
