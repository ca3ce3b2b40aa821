"""The first number of a replay that is not finite: where it comes up, and a file with all that went into it.

Left out: what runs do with such a step, which is to leave the update out and count it (Learner.step).
"""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from rl.learning.batch import Batch, MicroBatch
from rl.learning.learner import Learner
from rl.model.shards import local
from rl.ranks import dist


def of(metrics: Path) -> int | None:
    """The first step of a run whose gradient was not finite, by its metrics.jsonl; None if there is none."""
    skipped = 0
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        row = json.loads(line)
        if "actor/grad_norm" in row and (row["actor/grad_norm"] is None or row.get("actor/skipped_steps", 0) > skipped):
            return row["step"]
        skipped = row.get("actor/skipped_steps", skipped)
    return None


class NotFinite(Exception):
    """Raised on every learner in the first update that is not finite."""

    def __init__(self, what: str, update: int, number: int, seen: "_Seen"):
        """what: came up first; update: of the step, from 1; number: of the micro-batch in the update, from 1."""
        super().__init__(what)
        self.what, self.update, self.number, self.seen = what, update, number, seen

    def write(self, directory: Path, step: int, batch: Batch, rank: int) -> str:
        """Writes this learner's micro-batch as a safetensors file, the whole row where several share one; returns a line that
        says where."""
        micro, index = self.seen.micro, self.seen.micro.index
        responses = torch.unique(batch.seq[index]) if len(index) else index
        if micro.own is not None:  # this learner's is a piece
            micro = MicroBatch.of(dataclasses.replace(batch, images=None), responses.tolist(), torch.device("cpu"))
        tensors = {"input_ids": micro.inputs["input_ids"], "predict": micro.predict, "labels": micro.labels}
        tensors |= {"log_prob": self.seen.log_prob, "entropy": self.seen.entropy}
        if self.seen.grad is not None:
            tensors["grad_log_prob"] = self.seen.grad
        for name, value in vars(batch).items():  # [N] each: whatever the step has computed of them
            if isinstance(value, torch.Tensor) and len(value) == len(batch.token) != len(batch.lengths):
                tensors[name] = value[index]
        tensors |= {"response": responses, "group": batch.group[responses], "score": batch.score[responses]}
        tickets = sorted({batch.tickets[group] for group in batch.group[responses].tolist()})
        said = {"step": step, "update": self.update, "micro_batch": self.number, "what": self.what, "tickets": tickets}
        path = directory / f"bad_step_{step:06d}_learner_{rank}.safetensors"
        contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(contiguous, path, {name: json.dumps(value) for name, value in said.items()})
        where = f"micro-batch {self.number} of update {self.update} (tickets {', '.join(map(str, tickets))})"
        return f"step {step}: {self.what}, in {where}: {path}"


class _Seen:
    """A micro-batch, and what came of it."""

    def __init__(self, micro: MicroBatch, log_prob: torch.Tensor, entropy: torch.Tensor):
        self.micro, self.log_prob, self.entropy, self.grad = micro, log_prob.detach(), entropy.detach(), None
        log_prob.register_hook(self._keep)

    def _keep(self, grad: torch.Tensor) -> None:
        self.grad = grad.detach()


class Watch:
    """Replaces a learner: the first micro-batch of which something is not finite ends the step with NotFinite."""

    def __init__(self, learner: Learner):
        self._learner, self._seen, self._update = learner, [], 0
        self._bad: tuple[int, int, str] | None = None  # number of the micro-batch, and which of the things looked at, named

    def __getattr__(self, name: str):
        return getattr(self._learner, name)

    def log_probs(self, micro: MicroBatch, entropy: str = "none") -> tuple[torch.Tensor, torch.Tensor]:
        self._look()
        log_prob, of_metric = self._learner.log_probs(micro, entropy)
        self._seen.append(_Seen(micro, log_prob, of_metric))
        return log_prob, of_metric

    def step(self) -> dict[str, float]:
        """Raises NotFinite on all learners if a micro-batch of any was bad. A collective."""
        self._look()
        self._update += 1
        found = [json.loads(record) for record in dist.all_gather_bytes(json.dumps(self._bad).encode())]
        if first := min((of for of in found if of), default=None):
            number, _, what = first  # of those in one micro-batch the one from which the others follow
            raise NotFinite(what, self._update, number, self._seen[number - 1])
        self._seen.clear()
        return self._learner.step()

    def _look(self) -> None:
        """At the last micro-batch, after its backward pass."""
        if not self._seen or self._bad:
            return
        last = self._seen[-1]
        parts = {"the log-probs are": [last.log_prob], "the loss's gradient by log-probs is": [last.grad]}
        parts["the gradient of the weights is"] = [parameter.grad for parameter in self._learner.policy.parameters()]
        for place, (what, tensors) in enumerate(parts.items()):
            if not all(bool(local(t).isfinite().all()) for t in tensors if t is not None):
                self._bad = (len(self._seen), place, f"{what} not finite")
                return
