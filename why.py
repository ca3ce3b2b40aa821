"""Which group made this step what it was? Names those whose gradients are the largest parts of the step's.

    python why.py runs/demo --step 120
    torchrun --standalone --nproc-per-node 2 why.py runs/demo --step 120       # a run of two learners

The step's gradient is a sum over its groups. One replay of the step gives the sum. A second one gives each group's own part:
every group has micro-batches of its own, and the whole step's advantages and denominators. The weights are those before the
step, so the run needs a checkpoint before it (replay.py). Left out: groups that are harmful together.
"""

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
from rl import parts
from rl.errors import UserError
from rl.ranks import dist, process
from rl.record.run import GROUPS
from rl.record.validations import rows_of

SHOWN = 6  # groups

Gradient = list[torch.Tensor]  # this rank's part of that of each trained parameter, on the CPU


class Step(NamedTuple):
    """What `learn` is given."""

    args: Any
    script: ModuleType
    learner: Any
    batch: Any
    timer: Any

    def replay(self) -> None:
        """Add up the step's gradient: call `learn`, and take none of the optimizer's steps. Collective."""
        from rl.learning.batch import Targets

        learner = self.learner
        args = parts.replace(self.args, ppo_epochs=1)  # the weights stay, so each epoch has the same gradient
        self.batch.targets = Targets()
        critic = patch.object(learner.critic, "learn", lambda *_: {}) if learner.critic else nullcontext()
        with patch.multiple(learner, begin_step=lambda **_: None, step=lambda: {"actor/grad_norm": 0.0}), critic:
            self.script.learn(args, learner, self.batch, self.timer)

    def take_gradient(self) -> Gradient:
        """Return what has been added up since the last call."""
        from rl.ranks.shards import local

        trained = [p for p in self.learner.policy.parameters() if p.requires_grad]
        grads = [torch.zeros(()) if p.grad is None else local(p.grad).detach().float().cpu() for p in trained]
        self.learner.optimizer.zero_grad()
        return grads

    def replay_by_group(self, take: Callable[[int], None]) -> None:
        """Replay the step in micro-batches that hold one group only. Call `take` after each group's last one. Collective."""
        order: list[int] = []  # of the micro-batches, by group
        trained = iter(order)
        group = None
        forward = self.learner.forward

        def by_group(batch, members, max_tokens, ranks):
            from rl.learning.batch import micro_batch, plan_of

            plan = [[members[places] for places in columns] for columns in plan_of(batch, members, max_tokens, ranks)]
            groups_of = [{*batch.group[torch.cat(column)].tolist()} for column in zip(*plan, strict=True)]  # of all ranks
            in_order = sorted((of, column) for column, groups in enumerate(groups_of) for of in groups)
            order.extend(of for of, _ in in_order)
            own = plan[ranks.data_rank]
            pieces = [own[column][batch.group[own[column]] == of].tolist() for of, column in in_order]
            return [micro_batch(batch, piece, ranks) for piece in pieces]

        def forward_next(*inputs):
            nonlocal group
            before, group = group, next(trained)
            if before not in (None, group):
                take(before)
            return forward(*inputs)

        with patch.object(self.script, "micro_batches", by_group), patch.object(self.learner, "forward", forward_next):
            self.replay()
        take(group)


def dot(a: Gradient, b: Gradient) -> float:
    """Return the product of this rank's parts of two gradients."""
    return sum(float((x.double() * y).sum()) for x, y in zip(a, b, strict=True))


class Part(NamedTuple):
    """A group's part of a step."""

    ticket: int
    norm: float  # of its own gradient, relative to the step's
    share: float  # of the step's gradient: its length along it; those of all groups add up to 1


def measure(step: Step) -> list[Part]:
    """Return every group's part of the step, the largest first; none if the step has no gradient. If its gradient is not
    finite, return the groups whose own is not, with NaN. Collective."""
    step.replay()
    whole = step.take_gradient()
    square = float(dist.all_reduce_sum(torch.tensor(dot(whole, whole), dtype=torch.float64)))
    if not square:
        return []
    tickets = step.batch.tickets
    products = torch.zeros(len(tickets), 2, dtype=torch.float64)  # of each group's own gradient: with itself, with the whole

    def take(group: int) -> None:
        own = step.take_gradient()
        products[group] = torch.tensor([dot(own, own), dot(own, whole)], dtype=torch.float64)

    step.replay_by_group(take)
    of_groups = zip(tickets, *dist.all_reduce_sum(products).T.tolist(), strict=True)
    if not math.isfinite(square):
        return [Part(ticket, math.nan, math.nan) for ticket, own, _ in of_groups if not math.isfinite(own)]
    found = [Part(ticket, math.sqrt(own / square), along / square) for ticket, own, along in of_groups]
    return sorted(found, key=lambda part: -part.norm)


def name_parts(step: Step, run_dir: Path, number: int) -> Iterator[str]:
    """Yield lines for the user. number: of the step. Collective."""
    found = measure(step)
    if not found:
        yield f"step {number} has no gradient: no group made it what it was"
        return
    about = {g["ticket"]: g for row in rows_of(run_dir / GROUPS) if row["step"] == number for g in row["groups"]}
    is_finite = math.isfinite(found[0].norm)
    yield f"step {number}: {len(step.batch.tickets)} groups{'' if is_finite else '; its gradient is not finite, because of'}"
    yield "ticket   norm  share  row, scores, tokens"
    for part in found[:SHOWN]:
        what = ", ".join(str(about[part.ticket][name]) for name in ("where", "scores", "lengths"))
        yield f"{part.ticket:>6} {part.norm:>6.0%} {part.share:>6.0%}  {what}"
    if others := found[SHOWN:]:
        yield f"others {others[0].norm:>6.0%} {sum(part.share for part in others):>6.0%}  (the largest norm, all shares)"
    yield f"its responses: python view.py {run_dir} --exact {number}, at #/0/step/{number}/{found[0].ticket}"
    without = f"--from-step {number} --to-step {number} --without {found[0].ticket}"
    yield f"validation without it: python replay.py {run_dir} {without}"


def main(replay: replays.Replay, ranks: dist.Ranks) -> None:
    args, learner, run = replays.begin_again(replay, ranks)
    *earlier, number = run.steps()
    for step in earlier:
        replay.script.learn(args, learner, run.begin(replay.record.groups(step)), run.timer)
    step = Step(args, replay.script, learner, run.begin(replay.record.groups(number)), run.timer)
    for line in name_parts(step, replay.run_dir, number):
        run.record.say(line)


def read(words: Sequence[str]) -> replays.Replay:
    """Parse the command line, and find the step to replay. Raise UserError if that is impossible."""
    parser = replays.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    own, rest = parser.parse_known_args(words)
    folder = Path(tempfile.gettempdir()) / f"why-{own.run.name}"
    within = ["--from-step", str(own.step), "--to-step", str(own.step), "--output-dir", str(folder)]
    return replays.read([str(own.run), *within, *rest])


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__.strip())
        sys.exit()
    try:
        replay = read(sys.argv[1:])
    except UserError as error:
        process.fail(error)
    process.run(partial(main, replay), join=partial(dist.init, replay.args.hang_timeout))
