"""The schedule at a scale that no machine here has, in simulated time: what Python it takes for each token batch.

    python benchmarks/plan_scale.py      # half a minute on one core; writes benchmarks/results/plan_scale.{json,md}

Engines of 512 slots, 16 responses a prompt of log-normal lengths around 2,000 tokens, 512 prompts a step, a publish every 4
fetches of them, staleness threshold 0.5. A token batch is a decode step of one engine. CPU time, so that other work on the
machine changes little. The schedule is rl/samples/schedule.py's own; drawing the lengths is not counted.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import RESULTS, setting, table, words, write

from rl.plan.service_times import EngineTimes, LearnerTimes, ServiceTimes
from rl.plan.simulation import Load, Ranks
from rl.plan.stream import Stream
from rl.plan.workload import Drawn
from rl.samples.schedule import ScheduleArgs

TIMES = ServiceTimes(
    EngineTimes((1, 512), (0.01, 0.03), 1e-8, prefill=1e-3, prefill_token=1e-6, receive=0.2),
    LearnerTimes(step=0.5, token=1e-4, publish=0.1),
    "of the order of a model of 7B",
)


@dataclass
class Args:
    tickets: int = 100_000
    """Prompts of the largest run."""
    out: str = str(RESULTS)
    """Directory of the results."""


def one_run(engines: int, tickets: int) -> dict:
    args = ScheduleArgs(train_batch_size=512, ppo_mini_batch_size=128, publish_every=4, staleness_threshold=0.5)
    work, steps = Drawn(16, 2000, 0.8, 16_000, prompt=100), tickets // args.prompts_per_step
    for ticket in range(0, tickets + 4096, 1024):
        work.group(ticket)
    stream = Stream(TIMES, Load(args.prompts_per_step, 4, slots=512), Ranks(engines, engines), work, args, steps)
    started = time.process_time()
    out = stream.run()
    seconds = time.process_time() - started
    batches = sum(generator.engine.steps for generator in stream.generators)
    row = {"engines": engines, "tickets": steps * args.prompts_per_step, "tokens": sum(out.tokens), "token batches": batches}
    return row | {"seconds": seconds, "simulated hours": out.ends[-1] / 3600, "account": out.account}


def main(args: Args) -> None:
    few = args.tickets // 10
    rows = [one_run(engines, tickets) for engines, tickets in ((8, few), (64, few), (64, args.tickets))]
    cells = []
    for row in rows:
        each = [f"{row['seconds'] / row[what] * 1e6:.{digits}f}" for what, digits in (("token batches", 2), ("tickets", 0))]
        counts = [f"{row[what]:,}" for what in ("engines", "tickets", "tokens", "token batches")]
        cells.append([*counts, f"{row['seconds']:.1f}", *each])
    head = ["generators", "tickets", "tokens", "token batches", "seconds of Python", "us a token batch", "us a ticket of 16"]
    write("plan_scale", rows, f"{table(head, cells)}\n\n{words(setting())}.", Path(args.out))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
