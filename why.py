"""Which group made this step what it was? Names those whose gradients are the largest parts of the step's.

    python why.py runs/demo --step 120
    torchrun --standalone --nproc-per-node 2 why.py runs/demo --step 120       # a run of two learners

The step's gradient is a sum over its groups. One replay of the step gives it, and a first guess at each group's part: the sum
over its tokens of |dloss / dlog-prob| (1 - probability), which grows with the gradient at the logits. Six more give the exact
gradients of the six groups with the largest guesses, with the whole step's denominators. The weights are those before the step:
the run needs a checkpoint before it (replay.py). Left out: groups that are harmful together.
"""

import dataclasses
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import replay as replays
from rl.errors import UserError
from rl.ranks import dist, process
from rl.record.run import GROUPS
from rl.record.validations import rows_of

LOOKED_AT = 6  # groups whose gradients are computed


class Part(NamedTuple):
    """A group's part of a step."""

    ticket: int
    norm: float  # of its own gradient, relative to the step's
    share: float  # of the step's gradient: its length along it; those of all groups add up to 1


class Gradients:
    """The gradients of a step's groups, at the weights before the step, which do not change."""

    def __init__(self, args, script, learner, batch, timer):
        self.args, self.script, self.learner, self.batch, self.timer = args, script, learner, batch, timer
        self.replays = 0
        self.guesses = torch.zeros(len(batch.tickets), dtype=torch.float64)  # of the newest replay, by group
        self._actor_loss = script.actor_loss
        if learner.critic:
            learner.critic.learn = lambda *_: {}  # its values of this step are those from before

    def of(self, tickets: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's part of the gradient of these groups, for each of the step's updates. Collective."""
        from rl.learning.batch import Targets
        from rl.model.shards import local

        learner, batch = self.learner, self.batch
        wanted = {*tickets}
        keep = torch.tensor([batch.tickets[place] in wanted for place in batch.group.tolist()])
        guesses = torch.zeros_like(self.guesses)
        found: list[torch.Tensor] = []

        def actor_loss(args, t, out, denominator):
            kept = t.mask & keep.to(t.seq.device)[t.seq]
            terms, stats = self._actor_loss(args, dataclasses.replace(t, mask=kept), out, denominator)
            if out.log_prob.requires_grad and len(t.index):
                (slope,) = torch.autograd.grad(terms["loss"], out.log_prob, retain_graph=True)
                guess = slope.abs() * (1 - out.log_prob.detach().exp())
                guesses.index_add_(0, batch.group[t.seq.cpu()], guess.double().cpu())
            return terms, stats

        def step() -> dict[str, float]:
            grads = [p.grad for p in learner.policy.parameters() if p.grad is not None]
            found.append(torch.cat([local(grad).detach().float().flatten().cpu() for grad in grads]))
            learner.optimizer.zero_grad()
            return {"actor/grad_norm": 0.0}

        steps = learner.steps
        self.script.actor_loss, learner.step = actor_loss, step
        batch.targets = Targets()
        try:
            self.script.learn(self.args, learner, batch, self.timer)
        finally:
            self.script.actor_loss = self._actor_loss
            del learner.step
            learner.steps = steps
        self.guesses = torch.tensor(dist.all_gather_values(guesses.tolist()), dtype=torch.float64).sum(0)
        self.replays += 1
        return found


def dot(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Return the product of two gradients, over all updates and ranks. Collective."""
    return sum(dist.all_gather_values(sum(float(x.double() @ y.double()) for x, y in zip(a, b, strict=True))))


def search(gradients: Gradients, tickets: Sequence[int]) -> list[Part]:
    """Return the groups with the largest gradients, the largest first. tickets: of the step. Collective."""
    whole = gradients.of(tickets)
    square = dot(whole, whole)
    if not square:
        return []
    likely = gradients.guesses.argsort(descending=True)[:LOOKED_AT].tolist()
    parts = []
    for ticket in (gradients.batch.tickets[place] for place in likely):
        own = gradients.of([ticket])
        parts.append(Part(ticket, math.sqrt(dot(own, own) / square), dot(own, whole) / square))
    return sorted(parts, key=lambda part: -part.norm)


def main(replay: replays.Replay, ranks: dist.Ranks) -> None:
    args, learner, run = replays.begin_again(replay, ranks)
    say = run.record.say
    step = replay.last
    for earlier in run.steps()[:-1]:
        replay.script.learn(args, learner, run.begin(replay.record.groups(earlier)), run.timer)
    batch = run.begin(replay.record.groups(step))
    gradients = Gradients(args, replay.script, learner, batch, run.timer)
    parts = search(gradients, batch.tickets)
    if not parts:
        say(f"step {step} has no gradient: no group made it what it was")
        return
    rows = {row["step"]: row["groups"] for row in rows_of(replay.run_dir / GROUPS)}
    about = {group["ticket"]: group for group in rows.get(step, [])}
    say(f"step {step}: {len(batch.tickets)} groups, {gradients.replays} replays of the step")
    say("ticket   norm  share  row, scores, tokens")
    for part in parts:
        group = about.get(part.ticket, {})
        what = ", ".join(str(group.get(name, "unknown")) for name in ("where", "scores", "lengths"))
        say(f"{part.ticket:>6} {part.norm:>6.0%} {part.share:>6.0%}  {what}")
    say(f"its responses: python view.py {replay.run_dir} --exact {step}, at #/0/step/{step}/{parts[0].ticket}")


def read(words: Sequence[str]) -> replays.Replay:
    """Parse the command line. Raise UserError if the step cannot be replayed."""
    if len(words) < 3 or words[1] != "--step" or not words[2].isdecimal():
        raise UserError("give a run and a step: python why.py runs/demo --step 120")
    run, _, step, *rest = words
    folder = Path(tempfile.gettempdir()) / f"why-{Path(run).name}"
    within = ["--from-step", step, "--to-step", step, "--output-dir", str(folder)]
    return replays.read([run, *within, *rest])


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__.strip())
        sys.exit()
    try:
        replay = read(sys.argv[1:])
    except UserError as error:
        process.fail(error)
    process.run(partial(main, replay), join=partial(dist.init, replay.args.hang_timeout))
