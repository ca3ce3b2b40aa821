"""What environments cost: decoding steps while 1,000 slow tools are at work, and memory over 10,000 episodes.

    python benchmarks/generation/episodes.py          # writes benchmarks/results/episodes.{json,md}

The first measures the embedded engine's step with and without tools under way, interleaved; each tool sleeps 0.5 to 3 seconds
and is asked again as soon as it has answered. The second plays episodes of one turn to their end, a hundred at once.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from common import over, random_model, ratios, setting, table, tree, words, write

from rl.environments.args import EnvironmentArgs
from rl.environments.pool import Environments
from rl.generation.embedded import TransformersEngine
from rl.generation.engine import Request, SamplingParams

ENVIRONMENTS = Path(__file__).with_name("slow.py")


@dataclass
class Args:
    tools: int = 1000
    """Tools at work at once."""
    episodes: int = 10_000
    """Episodes of which the memory is measured."""
    at_once: int = 100
    """Of those, how many are under way at a time."""
    responses: int = 64
    """Responses that are decoded."""
    hidden: int = 512
    """Hidden size of the model that decodes, of 8 layers."""
    seconds: float = 10.0
    """Seconds of decoding in each measurement."""
    rounds: int = 5
    """Measurements of each side."""
    threads: int = 1
    """Threads that decode: the tools have the other cores, as they would next to an accelerator."""


def environments(name: str, model: str) -> Environments:
    return Environments(EnvironmentArgs(env=f"{ENVIRONMENTS}:{name}"), model, {1})


def wait_for(pool: Environments, count: int) -> list:
    """The next `count` answers."""
    answers = []
    while len(answers) < count:
        answers += pool.poll(1.0)
    failed = [answer for _, answer in answers if "event" in answer]
    if failed:
        raise RuntimeError(f"{len(failed)} environments failed: {failed[0]}")
    return answers


class Decoding:
    """An engine that always has `responses` to decode."""

    def __init__(self, model: str, responses: int):
        self.engine = TransformersEngine(model, max_length=520, max_num_seqs=responses)
        self.responses, self.begun = responses, 0

    def step(self) -> None:
        while self.engine.num_unfinished < self.responses:
            sampling = SamplingParams(max_tokens=128 + 6 * (self.begun % 64), ignore_eos=True)  # they end one after the other
            self.engine.add(Request(self.begun, [2, 5, 3], sampling, self.begun))
            self.begun += 1
        self.engine.step()


def rate(decoding: Decoding, seconds: float, pool: Environments | None) -> tuple[float, float]:
    """Decoding steps a second, and the tools' answers a second."""
    steps = answers = 0
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        if pool:
            for key, answer in pool.poll(0.0):
                if "event" in answer:
                    raise RuntimeError(answer["message"])
                answers += 1
                pool.ask(key, "step", ids=[5, 1])
        decoding.step()
        steps += 1
    return steps / spent, answers / spent


def measure_steps(args: Args, model: str) -> dict:
    decoding, pool = Decoding(model, args.responses), environments("Slow", model)
    for key in range(args.tools):
        pool.begin(key, {"prompt": []}, seed=key, own_seed=key)
    wait_for(pool, args.tools)
    rate(decoding, args.seconds / 2, None)  # not counted
    found = {"without": [], "with": [], "answers": []}
    for _ in range(args.rounds):
        found["without"].append(rate(decoding, args.seconds, None)[0])
        for key in range(args.tools):
            pool.ask(key, "step", ids=[5, 1])
        steps, answers = rate(decoding, args.seconds, pool)
        found["with"].append(steps)
        found["answers"].append(answers)
        wait_for(pool, args.tools)  # none is at work any more
    pool.close()
    return found


@dataclass
class Memory:
    """Of the rank, and of the process that environments are forked from, in MB, after that number of episodes."""

    episodes: list[int] = field(default_factory=list)
    rank: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def own_mb(pid: int | str) -> float:
    """Memory of a process that is no file's, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024 / 1e6


def measure_memory(args: Args, model: str) -> Memory:
    pool, found, started = environments("Quick", model), Memory(), time.perf_counter()
    for done in range(0, args.episodes + 1, args.at_once):
        if done % (args.episodes // 10) == 0:
            time.sleep(0.5)  # the last episodes' processes end
            found.episodes.append(done)
            found.rank.append(own_mb("self"))
            found.warm.append(sum(map(own_mb, tree(pool._server.pid))))
            found.seconds.append(time.perf_counter() - started)
            print(f"{done:,} episodes: rank {found.rank[-1]:.1f} MB, forked from {found.warm[-1]:.1f} MB", flush=True)
        keys = range(done, done + args.at_once)
        for key in keys:
            pool.begin(key, {"prompt": []}, seed=key, own_seed=key)
        wait_for(pool, args.at_once)
        for key in keys:
            pool.ask(key, "step", ids=[5, 1])
        wait_for(pool, args.at_once)
        for key in keys:
            pool.end(key)
    pool.close()
    return found


def main(args: Args) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as model:
        parameters = random_model(model, args.hidden, 8, 64)
        memory = measure_memory(args, model)
        steps = measure_steps(args, model)
    ratio = ratios(steps["with"], steps["without"])
    head = ["", "median (min - max)"]
    rows = [
        ["decoding steps a second, no tool at work", over(steps["without"])],
        [f"decoding steps a second, {args.tools:,} tools at work", over(steps["with"])],
        ["ratio, round by round", over(ratio)],
        ["tools' answers a second", over(steps["answers"], ".0f")],
    ]
    after = slice(1, None)  # the first tenth fills caches
    grown = {name: getattr(memory, name)[-1] - getattr(memory, name)[1] for name in ("rank", "warm")}
    rows += [
        [f"MB of the rank after {memory.episodes[1]:,} - {memory.episodes[-1]:,} episodes", over(memory.rank[after], ".1f")],
        ["MB of the process that environments are forked from", over(memory.warm[after], ".1f")],
        ["MB grown from the first to the last of these", f"{grown['rank']:+.1f}, {grown['warm']:+.1f}"],
        ["episodes a second", f"{memory.episodes[-1] / memory.seconds[-1]:.0f}"],
    ]
    facts = setting("transformers", threads=torch.get_num_threads(), parameters=f"{parameters:,}")
    write("episodes", {"steps": steps, "memory": vars(memory), "setting": facts}, f"{table(head, rows)}\n\n{words(facts)}.")
    print(f"median ratio {statistics.median(ratio):.3f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
