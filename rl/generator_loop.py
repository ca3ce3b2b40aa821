"""The surroundings of the algorithm in a generator's loop: its decisions, new weights, validation, samples for the learners.

`GeneratorLoop` is for train_async.py, `BatchLoop` for train_one_step_off.py, where the order is known beforehand.
"""

import json
from dataclasses import astuple, dataclass
from typing import Literal

from rl.data.job import Job
from rl.generation.make import make_generator
from rl.rewards.pool import ScoringPool
from rl.samples.channel import ControlBlock, Outbox
from rl.samples.group import Group
from rl.samples.schedule import check_kind
from rl.samples.split_schedule import AsyncSchedule, OneStepOffSchedule
from rl.samples.tickets import Tickets
from rl.setup import CommonArgs
from rl.split import Split, engines_first
from rl.weights.publish import Subscriber


@dataclass(frozen=True)
class Decision:
    """What the ranks of an engine do before its next step."""

    stop: bool
    version: int  # the weights' version for sampling
    tickets: list[int]  # tickets that start under this version
    idle: Literal["held", "wait"]  # the reason if it has no work: "held" by the bound of staleness, or another one
    snapshot: int  # the newest step whose checkpoint asks for the unfinished responses


class GeneratorLoop:
    """A generator, its engine, and its connections to the learners."""

    def __init__(self, args: CommonArgs, split: Split, job: Job):
        check_kind(args, AsyncSchedule, "GeneratorLoop")
        self.args, self.split, self.job = args, split, job
        self.generator = make_generator(args, job, split.ranks, ScoringPool(args.reward))
        engines_first("generator")
        self.engine = self.generator.engine
        self._outbox = Outbox(split)
        self._control = ControlBlock(split)
        self._subscriber = Subscriber(split, self.engine)
        to_train = job.total_steps * args.schedule.prompts_per_step
        self._tickets = Tickets(split.store, args.schedule, to_train, self.generator.engine_ranks.engines)
        self._validated = int(split.store.get("validated"))  # the newest step whose weights have been validated
        self._validating: int | None = None  # the step of the weights in validation
        self._snapshot = 0  # the newest step whose checkpoint got this generator's unfinished responses

    def decide(self) -> Decision | None:
        """Return the decision of the engine's first rank, on all of its ranks; None when the run stops."""
        ranks = self.generator.engine_ranks
        decision = Decision(*ranks.agree(astuple(self._decide()) if ranks.is_leader else None))
        # stop only after taking and verifying the last weights
        return None if decision.stop and decision.version == self.engine.version else decision

    def _decide(self) -> Decision:
        """Read what the learners say, and draw tickets. New weights wait for a running validation, which is of one version, and
        with --partial-rollout off also for unfinished responses. No ticket starts while newer weights are due."""
        generator = self.generator
        state = self._control.read()
        waits_for_responses = self.args.schedule.partial_rollout == "off" and generator.has_unfinished
        waits = not state.stop and (generator.is_validating or waits_for_responses)
        version = self.engine.version if waits else self._subscriber.due(state.version)
        tickets = self._tickets.take(generator.free_slots, len(generator.tickets), version, state)
        idle = "held" if self._tickets.held else "wait"
        return Decision(state.stop, version, tickets, idle, state.snapshot)

    def send_snapshot(self, step: int) -> None:
        """Send the unfinished responses for the checkpoint of this step, unless that is done: they continue after a restart."""
        if step > self._snapshot:
            self._snapshot = step
            self._outbox.send_snapshot(step, self.generator.unfinished())

    def update_weights(self, version: int, recompute_kv: bool) -> None:
        """Load the learners' weights of this version into the engine, and start their validation if it is due."""
        args = self.args
        total = self.job.total_steps
        generator = self.generator
        with generator.timer("update_weights"):
            self._subscriber.receive(version, recompute_kv)
        self._outbox.report(generator.timer, self._subscriber.received)
        if args.validates(version, total) and args.schedule.step_of(version, total) > self._validated:
            generator.start_validation()
            self._validating = self._subscriber.step

    def start(self, ticket: int) -> None:
        """Start the ticket's prompt, or continue the responses that it had when the run was stopped."""
        self.generator.start(ticket, self._tickets.partial(ticket))

    def send(self, group: Group) -> None:
        self._outbox.send_group(group)

    def send_validation(self) -> None:
        """Send the rows of a validation that has just ended."""
        if self._validating is None or self.generator.is_validating:
            return
        rows = self.generator.take_rows()
        self._outbox.send_rows(self._validating, self.engine.version, rows, parts=self.split.generators)
        self._validating = None

    def flush(self) -> None:
        """Hand over the records for which the ring had no room before."""
        self._outbox.flush()

    def finish(self) -> None:
        """Send the unfinished tickets to the learners, and end."""
        self._outbox.finish(unfinished=self.generator.tickets)
        self.generator.close()


class BatchLoop:
    """A generator of whole batches, each sampled by one version of the weights."""

    def __init__(self, args: CommonArgs, split: Split, job: Job):
        check_kind(args, OneStepOffSchedule, "BatchLoop")
        self.args, self.split, self.job = args, split, job
        self.generator = make_generator(args, job, split.ranks, ScoringPool(args.reward))
        engines_first("generator")
        self._outbox = Outbox(split)
        self._control = ControlBlock(split)
        self._subscriber = Subscriber(split, self.generator.engine)
        start = json.loads(split.store.get("start"))
        self.first, self.ticket = start["batch"], start["ticket"]  # of the first batch to generate
        self._oldest, self._validated = start["version"], start["validated"]

    def update_weights(self, version: int) -> None:
        """Wait for the weights of this version, load them into the engine, and validate them if that is due. A resumed run uses
        its first version instead of earlier ones."""
        generator = self.generator
        waits_as = "held" if version + 1 < self.job.total_steps else "wait"
        version = max(self._oldest, version)
        if version <= generator.engine.version:
            return
        with generator.timer(waits_as):
            self._control.read(version)
        with generator.timer("update_weights"):
            self._subscriber.receive(version)
        self._outbox.report(generator.timer, self._subscriber.received)
        if self.args.validates(version, self.job.total_steps) and version > self._validated:
            rows = generator.validate()
            if self.split.ranks.is_main:
                self._outbox.send_rows(version, version, rows)

    def send(self, groups: list[Group], next_ticket: int, metrics: dict[str, float]) -> None:
        """Send a batch to the learners, with its generation metrics."""
        self.ticket = next_ticket
        if self.split.ranks.is_main:
            self._outbox.send_batch(groups, self.generator.left_out, metrics, next_ticket)

    def finish(self) -> None:
        """Send the final record to the learners, and end."""
        self._outbox.finish(unfinished=[])
        self.generator.close()
