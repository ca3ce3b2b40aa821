"""Which group made this step what it was? Names those whose gradients are the largest parts of the step's.

    python why.py runs/demo --step 120
    python why.py runs/demo --step 120 --without 5217      # what validation after the step would be without that ticket
    torchrun --standalone --nproc-per-node 2 why.py runs/demo --step 120       # a run of two learners

The step's gradient is a sum over its groups. One replay of the step gives the sum. A second one gives each group's own part:
every group has micro-batches of its own, and the whole step's advantages and denominators. The weights are those before the
step, so the run needs a checkpoint before it (replay.py). Left out: groups that are harmful together.
"""

import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import replay as replays
from rl.errors import UserError
from rl.ranks import dist, process
from rl.record.run import GROUPS
from rl.record.validations import rows_of
from rl.samples.group import Group

SHOWN = 6  # groups

Gradient = list[torch.Tensor]  # this rank's part of each trained parameter's, on the CPU


class Step(NamedTuple):
    """What `learn` is given."""

    args: Any
    script: ModuleType
    learner: Any
    batch: Any
    timer: Any

    def replay(self, end_update: Callable[[], None]) -> None:
        """Call `learn` with `end_update` in place of the optimizer's steps: the weights do not change. Collective."""
        from rl.learning.batch import Targets

        learner = self.learner

        def step() -> dict[str, float]:
            end_update()
            return {"actor/grad_norm": 0.0}

        steps = learner.steps
        self.batch.targets = Targets()
        critic = patch.object(learner.critic, "learn", lambda *_: {}) if learner.critic else nullcontext()
        with patch.object(learner, "step", step), critic:
            self.script.learn(self.args, learner, self.batch, self.timer)
        learner.steps = steps

    def take_gradient(self) -> Gradient:
        """Return what has been accumulated since the last call."""
        from rl.model.shards import local

        trained = [p for p in self.learner.policy.parameters() if p.requires_grad]
        grads = [torch.zeros(()) if p.grad is None else local(p.grad).detach().float().cpu() for p in trained]
        self.learner.optimizer.zero_grad()
        return grads


class ByGroup:
    """Measures the gradient of each group of a step, in micro-batches that hold one group only."""

    def __init__(self, step: Step, whole: list[Gradient]):
        """whole: the gradient of each update."""
        self._step = step
        self.squares = [0.0] * len(step.batch.tickets)  # of each group's own gradient, summed over the updates
        self.products = [0.0] * len(step.batch.tickets)  # of it and the whole one
        self._groups: list[int] = []  # of the micro-batches, in the order in which they are trained
        self._next_group = itertools.cycle(self._groups)  # again in each of --ppo-epochs
        self._next_update = iter(whole)
        self._update: Gradient = next(self._next_update)
        self._group: int | None = None  # the one under way
        self._forward = step.learner.forward

    def replay(self) -> None:
        """Collective."""
        micro_batches = patch.object(self._step.script, "micro_batches", self._micro_batches)
        with micro_batches, patch.object(self._step.learner, "forward", self._forward_next):
            self._step.replay(self._end_update)

    def _micro_batches(self, batch, members, max_tokens, ranks):
        from rl.learning.micro_batches import micro_batch, plan_of

        pieces: dict[tuple[int, int], list[int]] = {}  # (group, column of the plan) -> this rank's responses
        for rank, columns in enumerate(plan_of(batch, members, max_tokens, ranks)):
            for column, places in enumerate(columns):
                for response in members[places].tolist():
                    piece = pieces.setdefault((int(batch.group[response]), column), [])
                    piece += [response] * (rank == ranks.data_rank)
        in_order = sorted(pieces)
        self._groups += [group for group, _ in in_order]
        return [micro_batch(batch, pieces[place], ranks) for place in in_order]

    def _forward_next(self, *inputs):
        group = next(self._next_group)
        if self._group not in (None, group):
            self._end_group()
        self._group = group
        return self._forward(*inputs)

    def _end_group(self) -> None:
        own = self._step.take_gradient()
        self.squares[self._group] += dot(own, own)
        self.products[self._group] += dot(own, self._update)

    def _end_update(self) -> None:
        if self._group is not None:
            self._end_group()
        self._group = None
        self._update = next(self._next_update, self._update)


def dot(a: Gradient, b: Gradient) -> float:
    """Return the product of this rank's parts of two gradients."""
    return sum(float((x.double() * y).sum()) for x, y in zip(a, b, strict=True))


def sum_of_ranks(values: list[float]) -> list[float]:
    """Collective."""
    return [sum(of_ranks) for of_ranks in zip(*dist.all_gather_values(values), strict=True)]


class Part(NamedTuple):
    """A group's part of a step."""

    ticket: int
    norm: float  # of its own gradient, relative to the step's
    share: float  # of the step's gradient: its length along it; those of all groups add up to 1


def measure(step: Step) -> list[Part]:
    """Return every group's part of the step, the largest first; none if the step has no gradient. If its gradient is not
    finite, return the groups whose own is not, with NaN. Collective."""
    whole: list[Gradient] = []
    step.replay(lambda: whole.append(step.take_gradient()))
    (square,) = sum_of_ranks([sum(dot(update, update) for update in whole)])
    if not square:
        return []
    groups = ByGroup(step, whole)
    groups.replay()
    of_groups = zip(step.batch.tickets, sum_of_ranks(groups.squares), sum_of_ranks(groups.products), strict=True)
    if not math.isfinite(square):
        return [Part(ticket, math.nan, math.nan) for ticket, own, _ in of_groups if not math.isfinite(own)]
    parts = [Part(ticket, math.sqrt(own / square), along / square) for ticket, own, along in of_groups]
    return sorted(parts, key=lambda part: -part.norm)


def name_parts(step: Step, run_dir: Path, number: int) -> Iterator[str]:
    """Yield lines for the user. number: of the step. Collective."""
    parts = measure(step)
    if not parts:
        yield f"step {number} has no gradient: no group made it what it was"
        return
    rows = {row["step"]: row["groups"] for row in rows_of(run_dir / GROUPS)}
    about = {group["ticket"]: group for group in rows.get(number, [])}
    yield f"step {number}: {len(step.batch.tickets)} groups"
    if math.isnan(parts[0].norm):
        yield "its gradient is not finite, because of"
    yield "ticket   norm  share  row, scores, tokens"
    for part in parts[:SHOWN]:
        group = about.get(part.ticket, {})
        what = ", ".join(str(group.get(name, "unknown")) for name in ("where", "scores", "lengths"))
        yield f"{part.ticket:>6} {part.norm:>6.0%} {part.share:>6.0%}  {what}"
    if others := parts[SHOWN:]:
        yield f"others {others[0].norm:>6.0%} {sum(part.share for part in others):>6.0%}  (the largest norm, all shares)"
    yield f"its responses: python view.py {run_dir} --exact {number}, at #/0/step/{number}/{parts[0].ticket}"
    yield f"validation without it: python why.py {run_dir} --step {number} --without {parts[0].ticket}"


def leave_out(step: Step, run, groups: list[Group], ticket: int) -> Iterator[str]:
    """Take the step with all groups and without one, validate both, and yield lines for the user. Raise UserError if that is
    impossible. Collective."""
    from rl.algorithm.metrics import validation_metrics
    from rl.model.shards import local
    from rl.weights.local import LocalWeights

    others = [group for group in groups if group.ticket != ticket]
    if len(others) == len(groups):
        raise UserError(f"--without {ticket}: the step's tickets are {', '.join(str(group.ticket) for group in groups)}.")
    if not run.job.val_prompts:
        raise UserError("--without compares validations, and the run has none (--test-freq 0).")
    args = step.args
    learner = step.learner
    generator = run.generator
    weights = LocalWeights(learner, generator.engine, args.engine.weights_dtype(args.learner.dtype))
    before = {name: local(tensor).clone() for name, tensor in learner.state_tensors().items()}
    state = learner.state()
    rank_state = learner.rank_state()
    scores = []
    for trained in (groups, others):
        generator.engine.sleep()
        for name, tensor in learner.state_tensors().items():
            local(tensor).copy_(before[name])
        learner.restore(state, rank_state)
        step.script.learn(args, learner, run.begin(trained), run.timer)
        weights.publish(version=learner.steps)
        scores.append(validation_metrics(generator.validate()))
    generator.close()
    yield f"validation after the step with all {len(groups)} groups, and without ticket {ticket}:"
    for name, score in scores[0].items():
        yield f"{score:.4f}  {scores[1][name]:.4f}  {name}"


def main(replay: replays.Replay, ticket: int | None, ranks: dist.Ranks) -> None:
    args, learner, run = replays.begin_again(replay, ranks, validates=ticket is not None)
    *earlier, number = run.steps()
    for step in earlier:
        replay.script.learn(args, learner, run.begin(replay.record.groups(step)), run.timer)
    groups = replay.record.groups(number)
    step = Step(args, replay.script, learner, run.begin(groups), run.timer)
    lines = name_parts(step, replay.run_dir, number) if ticket is None else leave_out(step, run, groups, ticket)
    for line in lines:
        run.record.say(line)


def read(words: Sequence[str]) -> tuple[replays.Replay, int | None]:
    """Parse the command line. Return what to replay, and the ticket to leave out. Raise UserError if that is impossible."""
    parser = replays.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--without", type=int)
    own, rest = parser.parse_known_args(words)
    folder = Path(tempfile.gettempdir()) / f"why-{own.run.name}"
    within = ["--from-step", str(own.step), "--to-step", str(own.step), "--output-dir", str(folder)]
    return replays.read([str(own.run), *within, *rest]), own.without


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__.strip())
        sys.exit()
    try:
        replay, without = read(sys.argv[1:])
    except UserError as error:
        process.fail(error)
    process.run(partial(main, replay, without), join=partial(dist.init, replay.args.hang_timeout))
