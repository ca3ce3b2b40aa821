"""Service times measured on the machine at hand, with the project's own engine and learner, as the ranks of a job.

`calibrate` starts torchrun on this file. Split ranks measure at the same time, each role during the other's work, as in a run;
colocated ranks all generate, then all learn. The generator makes groups of drawn lengths while a shadow of its engine
(rl/plan/engine.py) counts what each step held, and least squares finds what a row, a token of context, a prefill cost. The
learners train random tokens of the same lengths, in batches of several sizes. Weights are not kept.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rl import flags
from rl.algorithm.kl_control import KLControl
from rl.data.job import Job
from rl.data.prompts import Prompt
from rl.errors import UserError
from rl.generation.generator import Generator, make_generator
from rl.plan.choices import mode_of
from rl.plan.engine import Engine
from rl.plan.engine import Group as Counted
from rl.plan.fit import fit_engine, fit_learner
from rl.plan.service_times import EngineTimes, LearnerTimes, ServiceTimes, from_dict
from rl.plan.workload import Drawn
from rl.ranks import dist, launch, process
from rl.ranks.host import cpu_name
from rl.rewards.pool import Score, ScoringPool
from rl.samples import outlines
from rl.samples.control import ControlBlock
from rl.samples.group import Group, Response
from rl.setup import make_learner, set_up
from rl.split import Split, init_split
from rl.training_run import TrainingRun
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber

ROOT = Path(__file__).resolve().parent.parent.parent
PUBLISHES = 6
UNITS = EngineTimes((1,), (1.0,))  # of the shadow, which only counts


@dataclass(frozen=True)
class Order:
    """What `calibrate` asks of its ranks."""

    script: str  # a module: train_sync, train_one_step_off, train_async, or a copy of one
    flags: list[str]
    workload: dict  # fields of Drawn
    seconds: float  # of each measurement
    out: str  # where the service times go


def calibrate(script: str, flags: list[str], workload: Drawn, ranks: int, seconds: float = 20.0) -> ServiceTimes:
    """Measures with this many ranks of this machine. workload: the lengths to measure with. Raises UserError if the ranks fail,
    whose own message stands above."""
    shape = {name: getattr(workload, name) for name in ("n", "mean", "sigma", "longest")}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "times.json")
        order = Order(script, [*flags, "--output-dir", directory], shape, seconds, str(out))
        Path(directory, "order.json").write_text(json.dumps(dataclasses.asdict(order)))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *torchrun, "-m", "rl.plan.calibrate", f"{directory}/order.json"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise UserError(f"the calibration failed with exit code {done.returncode}: its message stands above.")
        return from_dict(json.loads(out.read_text()))


# ------------------------------------------------------------------------------------------------------------- engine


class Lengths:
    """The order's lengths, as whole numbers of the script's flags."""

    def __init__(self, order: Order, args):
        self.drawn = Drawn(**order.workload | {"longest": min(order.workload["longest"], args.max_response_length)})
        self.args = args

    def of(self, ticket: int) -> list[int]:
        return self.drawn.group(ticket)[1]


class NoScores:
    """In place of scoring processes, whose time is measured apart."""

    def __init__(self):
        self._done: list = []

    def submit(self, key, *_) -> None:
        self._done.append((key, Score(0.0)))

    def poll(self) -> list:
        done, self._done = self._done, []
        return done


class EngineMeter:
    """Rounds of generation with given lengths, and what each engine step held."""

    def __init__(self, generator: Generator, lengths: Lengths):
        self.generator, self.lengths = generator, lengths
        if generator.args.reward:
            generator.pool = NoScores()
        add, n = generator.engine.add, generator.args.rollout_n

        def add_of_a_length(request):
            ticket, number = request.id
            tokens = lengths.of(ticket)[min(number, n - 1)]
            sampling = dataclasses.replace(request.sampling, max_tokens=tokens, ignore_eos=True)
            add(dataclasses.replace(request, sampling=sampling))

        generator.engine.add = add_of_a_length
        self.rows: list[tuple] = []  # as fit_engine takes them
        self.ticket = 0

    def round(self, tickets: int, keep: bool) -> None:
        """Makes this many groups; `keep` remembers the steps."""
        args, generator = self.generator.args, self.generator
        shadow = Engine(UNITS, args.max_num_seqs, args.max_num_batched_tokens)
        for ticket in range(self.ticket, self.ticket + tickets):
            generator.start(ticket)
            shadow.add(Counted(ticket, len(generator.working[ticket].prompt.ids), self.lengths.of(ticket), True))
        self.ticket += tickets
        while generator.working:
            shadow.begin()
            held = (shadow.running, shadow.context, *shadow.prefilled)
            started = time.perf_counter()
            for group in generator.poll(wait=1.0):
                group.to_bytes()
            seconds = time.perf_counter() - started
            ended = len(shadow.end(1)) if shadow.running else 0
            if keep and held[0]:
                self.rows.append((*held, ended, seconds))


def scoring_seconds(args, pool: ScoringPool, prompts: list[Prompt]) -> float:
    """Seconds that a scoring process works on a response; 0 for the built-in rewards, which are scored in place."""
    if not args.reward:
        return 0.0
    for count in (args.reward_workers, 4 * args.reward_workers):  # the first round is a process's start
        started = time.perf_counter()
        for i in range(count):
            prompt = prompts[i % len(prompts)]
            pool.submit(i, prompt.data_source, "1", prompt.ground_truth, prompt.extra_info)
        while pool.pending:
            pool.wait(1.0)
    return (time.perf_counter() - started) / 4


# ------------------------------------------------------------------------------------------------------------ learner


class LearnerMeter:
    """Steps of the script's own `learn`, with all that stands around it in the script's loop, over random tokens."""

    def __init__(self, script, args, job: Job, ranks: dist.Ranks, lengths: Lengths):
        self.script, self.args, self.job, self.lengths = script, args, job, lengths
        self.learner, self.kl_control = make_learner(args, job, ranks), KLControl(args)
        self.run = TrainingRun(args, job, self.learner, launch.here().world_size, kl_control=self.kl_control)
        self.rows: list[tuple] = []  # as fit_learner takes them
        self.step = self.ticket = 0

    def round(self, prompts: int, keep: bool) -> None:
        args, run = self.args, self.run
        records = [self._group(self.ticket + i).to_bytes() for i in range(prompts)]
        self.ticket, self.step = self.ticket + prompts, self.step + 1
        started = time.perf_counter()
        batch = run.begin([Group.from_bytes(record) for record in records])
        metrics = self.script.learn(args, self.learner, self.kl_control, batch, run.timer)
        run.log(self.step, batch, metrics)
        seconds = time.perf_counter() - started
        if keep:
            updates = args.ppo_epochs * -(-prompts // args.prompts_per_update)
            self.rows.append((updates, batch.distinct_tokens(), sum(n * n for n in batch.total_lengths()), seconds))

    def _group(self, ticket: int) -> Group:
        random = np.random.default_rng(ticket)
        prompt = self.job.prompts[self.job.order(ticket)[1]]
        vocabulary = min(1000, self.learner.config.get_text_config().vocab_size)
        responses = [
            Response(
                token_ids=random.integers(0, vocabulary, length).astype(np.int32),
                log_probs=np.full(length, -2.0, np.float32),
                versions=np.zeros(length, np.int32),
                finish_reason="stop",
                score=float(random.random()),
            )
            for length in self.lengths.of(ticket)
        ]
        return Group(ticket, np.array(prompt.ids, np.int32), prompt.data_source, responses, baseline=0.5)


# --------------------------------------------------------------------------------------------------------- the ranks


def rounds(measure, sizes: list[int], seconds: float, go_on) -> None:
    """Rounds of these sizes in turn, the first of each not kept, for at least so long; then more until `go_on` says no."""
    for size in sizes:
        measure(size, False)
    started, kept = time.perf_counter(), 0
    while go_on(time.perf_counter() - started < seconds or kept < 2 * len(sizes)):
        measure(sizes[kept % len(sizes)], True)
        kept += 1


def sizes_of(args, engines: int) -> list[int]:
    """Tickets of a generator's rounds: from one to what a batch gives an engine, or fills it."""
    most = max(1, -(-args.prompts_per_step // engines), args.max_num_seqs // args.rollout_n)
    return sorted({1, max(1, most // 4), max(1, most // 2), most})


def agreed(flag: bool) -> bool:
    """Whether all ranks of this one's role say so. A collective."""
    return bool(dist.all_reduce_sum(torch.tensor([float(flag)])) >= torch.distributed.get_world_size())


def fractions(args) -> list[int]:
    """Prompts of the learners' rounds."""
    whole = args.prompts_per_step
    return sorted({max(1, whole // 4), max(1, whole // 2), whole})


def colocated(order: Order, args, script, ranks: dist.Ranks) -> ServiceTimes:
    """All ranks generate, then all learn: train_sync.py."""
    job, lengths, pool = set_up(args, script.__file__), Lengths(order, args), ScoringPool(args)
    learning = LearnerMeter(script, args, job, ranks, lengths)
    generator = make_generator(args, job, ranks, pool)
    engine = generator.engine
    engine.update(learning.learner.weights(), version=0)
    score, meter = scoring_seconds(args, pool, job.prompts), EngineMeter(generator, lengths)
    rounds(meter.round, sizes_of(args, ranks.world_size), order.seconds, agreed)
    rounds(learning.round, fractions(args), order.seconds, agreed)
    update = timed(lambda: engine.update(learning.learner.weights(), version=0))
    share = [learning._group(ticket) for ticket in range(-(-args.prompts_per_step // ranks.world_size))]
    gather = timed(lambda: outlines.all_gather_groups(share))
    pool.close()
    times = fit_engine(meter.rows, engine.shares_memory)
    times = dataclasses.replace(times, receive=update, score=score, score_workers=args.reward_workers)
    return ServiceTimes(
        times, fit_learner(learning.rows, ranks.world_size), source(f"{ranks.world_size} colocated ranks"), gather
    )


def split(order: Order, args, script, parts: Split) -> ServiceTimes | None:
    """Generators and learners side by side; the times are the first learner's to tell."""
    job, lengths, store = set_up(args, script.__file__), Lengths(order, args), parts.store

    def go_on(wanted: bool) -> bool:
        """The role has enough once all its ranks have; it works on until the other has, too."""
        if not agreed(wanted) and parts.ranks.is_main:
            store.set(f"calibrated/{parts.role}", "1")
        other = "learner" if parts.role == "generator" else "generator"
        return agreed(not (store.check([f"calibrated/{parts.role}"]) and store.check([f"calibrated/{other}"])))

    if parts.role == "generator":
        engine = _generators_times(order, args, job, lengths, parts, go_on)
        if parts.ranks.is_main:
            store.set("calibrated/times", json.dumps(dataclasses.asdict(engine)))
        return None
    learner = _learners_times(order, args, script, job, lengths, parts, go_on)
    engine = json.loads(store.get("calibrated/times"))
    where = source(f"{parts.generators} generators with {parts.learners} learners")
    return from_dict({"engine": engine, "learner": dataclasses.asdict(learner), "source": where})


def _generators_times(
    order: Order, args, job: Job, lengths: Lengths, parts: Split, go_on: Callable[[bool], bool]
) -> EngineTimes:
    with ScoringPool(args) as pool:
        generator = make_generator(args, job, parts.ranks, pool)
        engine, control, subscriber = generator.engine, ControlBlock(parts), Subscriber(parts, generator.engine)
        control.wait_for(0)
        subscriber.receive(0)
        score, meter = scoring_seconds(args, pool, job.prompts), EngineMeter(generator, lengths)
        rounds(meter.round, sizes_of(args, parts.generators // args.rollout_tp), order.seconds, go_on)
        seconds = []
        for version in range(1, PUBLISHES + 1):
            control.wait_for(version)
            started = time.perf_counter()
            subscriber.receive(version)
            seconds.append(time.perf_counter() - started)
    times = fit_engine(meter.rows, engine.shares_memory)
    return dataclasses.replace(times, receive=float(np.median(seconds)), score=score, score_workers=args.reward_workers)


def _learners_times(
    order: Order, args, script, job: Job, lengths: Lengths, parts: Split, go_on: Callable[[bool], bool]
) -> LearnerTimes:
    learning, control = LearnerMeter(script, args, job, parts.ranks, lengths), ControlBlock(parts)
    publisher = Publisher(learning.learner, parts, args.weights_dtype(args.dtype), args.publish)
    publisher.publish(0)
    control.update(version=0)
    rounds(learning.round, fractions(args), order.seconds, go_on)
    seconds = []
    for version in range(1, PUBLISHES + 1):
        publisher.wait()
        started = time.perf_counter()
        publisher.publish(version)
        control.update(version=version)
        seconds.append(time.perf_counter() - started)
    publisher.wait()
    return dataclasses.replace(fit_learner(learning.rows, parts.learners), publish=float(np.median(seconds)))


def timed(action, times: int = 5) -> float:
    """Seconds of the median of this many calls."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def source(where: str) -> str:
    return f"measured on {dist.describe_hardware()['device_name'] or cpu_name()}: {where}"


def main(order: Order, joined: dist.Ranks | Split) -> None:
    script = importlib.import_module(order.script)
    args = flags.read(script.Args, args=order.flags)
    args = dataclasses.replace(args, lr=1e-12, logger=(), test_freq=0, save_freq=0, experiment_name=None)
    measure = colocated if isinstance(joined, dist.Ranks) else split
    times = measure(order, args, script, joined)
    if times and (joined if isinstance(joined, dist.Ranks) else joined.ranks).is_main:
        Path(order.out).write_text(json.dumps(dataclasses.asdict(times)))


if __name__ == "__main__":
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    if mode_of(order.script) == "train_sync":
        process.run(lambda ranks: main(order, ranks), join=dist.init)
    else:
        generators = flags.read(importlib.import_module(order.script).Args, args=order.flags).generators
        process.run(lambda parts: main(order, parts), join=lambda: init_split(generators))
