"""Nodes far apart, on slow links, and what travels between them: jobs on machines of tests/tools/nodes.py, all on this one.

    python benchmarks/weights/nodes.py        # writes benchmarks/results/nodes.{json,md}

Far: the learner on one node, the generator on another, with and without a delay on the generator's link; longer: the same with
more responses, so that a step takes longer. Slow: the link limited; a step's generation and training are what each side says it
worked, the link's time is the bytes that it carried over its rate. Bytes a step: of each node's link, heads and handshakes
included, against what the weights and the samples have.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import RESULTS, ROOT, logged, over, ratios, setting, table, words, write

sys.path.insert(0, str(ROOT / "tests" / "tools"))
from helpers import environment
from nodes import Network, Node

TOKEN_BYTES, RESPONSE_BYTES = 12, 60  # of a record: token, log-prob and version; the rest of a response
LAYOUTS = {  # (ranks, generators) of each node
    "a node learns, one generates": [(1, 0), (1, 1)],
    "two learn, one generates": [(1, 0), (1, 0), (1, 1)],
    "two do both": [(2, 1), (2, 1)],
}


@dataclass
class Args:
    rounds: int = 3
    """Runs of each case; those with and without a delay take turns."""
    steps: int = 40
    """Of a run. The first quarter is not counted."""
    delay: float = 0.05
    """Seconds there and back."""
    mbit: float = 100.0
    """Of the slow link, each way."""
    parts: tuple[Literal["far", "longer", "slow", "bytes"], ...] = ("far", "longer", "slow", "bytes")
    """What to measure. The rest stays as it is in the results."""


@dataclass
class Measured:
    seconds: float  # of a step
    generating: float  # a generator's work for it
    training: float  # a learner's
    traffic: list[tuple[float, float]]  # by node: bytes a step that came in over its link, and that went out
    tokens: float  # of the step's responses
    prompts: float  # of its prompts, each once
    responses: int


def delay_link(node: Node, seconds: float) -> subprocess.Popen:
    """Delays the node's link, one way. Returns the process between its ends, which ends when this forgets it."""
    node.switch.run(f"ip link delete {node.port}")
    ends = [str(node.pid), "e0", str(node.switch.pid), node.port]
    line = [sys.executable, ROOT / "benchmarks" / "delayed_link.py", *ends, str(seconds)]
    process = subprocess.Popen(line, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdout.readline() != "ready\n":
        raise RuntimeError("no delayed link: what it said stands above")
    node.join()
    return process


def shape(node: Node, mbit: float) -> None:
    """Limits the node's link, each way."""
    limit = f"root tbf rate {mbit}mbit burst 128kb latency 400ms"
    node.run(f"tc qdisc replace dev e0 {limit}")
    node.switch.run(f"tc qdisc replace dev {node.port} {limit}")


def link_bytes(node: Node) -> tuple[int, int]:
    """Bytes received and sent over the node's link, with all headers."""
    counted = node.run("cat /proc/net/dev").partition("e0:")[2].split()
    return int(counted[0]), int(counted[8])


def measure(script: str, layout: list[tuple[int, int]], args: Args, delay: float = 0.0, mbit: float = 0.0) -> Measured:
    """One run. script: with flags; delay, mbit: of the last node's link."""
    script, *more = script.split()
    with tempfile.TemporaryDirectory() as out, Network(len(layout)) as network:
        link = delay_link(network.nodes[-1], delay / 2) if delay else None
        if mbit:
            shape(network.nodes[-1], mbit)
        for node in network.nodes if delay else ():  # as docs/nodes.md says for long links
            node.run("sysctl -qw net.ipv4.tcp_slow_start_after_idle=0")
        flags = ["--total-training-steps", args.steps, "--test-freq", 0, "--save-freq", 0, "--output-dir", out]
        flags += ["--experiment-name", "run", *more]
        job = network.start([(n, [script, *flags, "--generators", g]) for n, g in layout], fresh=True)
        counted, begin = {}, args.steps // 4
        while len(counted) < 2:
            rows, ended = logged(Path(out) / "run" / "metrics.jsonl"), any(p.poll() is not None for p in job.processes)
            step = rows[-1]["step"] if rows else 0
            if step >= (begin if not counted else args.steps - 2):
                counted[step] = [link_bytes(node) for node in network.nodes]
            elif ended:
                raise RuntimeError("\n".join(console for _, console in job.wait(60)))
            time.sleep(2e-3)
        assert all(code == 0 for code, _ in job.wait(120))
        del link
        rows = logged(Path(out) / "run" / "metrics.jsonl")
    (first, before), (last, after) = counted.items()
    traffic = [tuple((b - a) / (last - first) for a, b in zip(*pair, strict=True)) for pair in zip(before, after, strict=True)]
    rows = [row for row in rows if begin < row["step"]]
    mean = lambda name: statistics.mean(row[name] for row in rows if name in row)  # noqa: E731
    seconds = statistics.median(row["timing_s/step"] for row in rows)
    work = lambda phases: seconds * sum(mean(f"ledger/{phase}") for phase in phases)  # noqa: E731
    responses = 64
    return Measured(
        seconds=seconds,
        generating=work(["generator_0/generate", "generator_0/score"]),
        training=work(["learner_0/train"]),
        traffic=traffic,
        tokens=responses * mean("response_length/mean"),
        prompts=8 * mean("prompt_length/mean"),
        responses=responses,
    )


def far(args: Args, flags: str = "") -> dict:
    """Seconds a step of each script, near and far, by round."""
    layout, found = LAYOUTS["a node learns, one generates"], {}
    for script in (f"train_one_step_off.py{flags}", f"train_async.py{flags}"):
        found[script] = {"near": [], "far": []}
        for _ in range(args.rounds):
            for side, delay in (("near", 0.0), ("far", args.delay)):
                found[script][side].append(measure(script, layout, args, delay=delay).seconds)
                print(f"{script}, {side}: {found[script][side][-1]:.3f} s a step", flush=True)
    return found


def slow(args: Args) -> list[dict]:
    layout = LAYOUTS["a node learns, one generates"]
    return [asdict(measure("train_async.py", layout, args, mbit=args.mbit)) for _ in range(args.rounds)]


def carried(args: Args) -> dict:
    return {name: asdict(measure("train_async.py", layout, args)) for name, layout in LAYOUTS.items()}


def expected(layout: list[tuple[int, int]], weights: float, samples: float) -> list[tuple[float, float]]:
    """Bytes a step that come in over each node's link, and go out; one learner and one generator a node at most.

    Learners gather the weights twice (forward, backward) and sum the gradients, which gloo does as an all-reduce, so twice as
    well; each of the four moves what the others have. For the publish the first learner of a node that does both collects the
    others' shards; a node that only generates is sent the whole by one that learns, which does so for it. Samples leave nodes
    that only generate.
    """
    learners = [number for number, (ranks, generators) in enumerate(layout) if ranks > generators]
    shard, out = weights / len(learners), []
    far = sum(ranks == generators for ranks, generators in layout)  # nodes, at most one, which the first sends to
    sending = [number for number in learners if layout[number][1] or (far and number == 0)]
    for number, (_, generators) in enumerate(layout):
        learns, first = number in learners, number == 0
        exchange = 4 * shard * (len(learners) - 1) if learns else 0
        alone = samples if generators and not learns else 0
        came = exchange + (shard * (len(learners) - 1) if number in sending else 0) + (weights if not learns else 0)
        went = exchange + shard * learns * len([other for other in sending if other != number]) + far * first * weights + alone
        out.append((came + (samples if first and len(learners) < len(layout) else 0), went))
    return out


def tables(data: dict) -> str:
    rows, delay = [], 1e3 * data["far"]["args"]["delay"]
    for script, sides in [*data["far"]["runs"].items(), *data["longer"]["runs"].items()]:
        rows.append([f"`{script}`", *(over(its, ".3f") for its in sides.values()), over(ratios(sides["far"], sides["near"]))])
    far = table(["", "s a step", f"{delay:.0f} ms apart", "ratio"], rows)

    its, mbit = data["slow"]["runs"], data["slow"]["args"]["mbit"]
    link = [8e-6 * max(one["traffic"][-1]) / mbit for one in its]
    parts = [[one["generating"] for one in its], [one["training"] for one in its], link]
    steps = [one["seconds"] for one in its]
    row = [
        *(over(part, ".3f") for part in [*parts, steps]),
        over(ratios(steps, [max(each) for each in zip(*parts, strict=True)])),
    ]
    slow = table(["generating, s a step", "training", f"the link, {mbit:g} Mbit/s", "the step", "over the longest"], [row])

    rows = []
    for name, one in data["bytes"]["runs"].items():
        samples = TOKEN_BYTES * one["tokens"] + RESPONSE_BYTES * one["responses"] + 4 * one["prompts"]
        theory = expected(LAYOUTS[name], 4 * data["parameters"], samples)
        for number, (measured, wanted) in enumerate(zip(one["traffic"], theory, strict=True), 1):
            ways = [f"{1e-6 * a:.2f} ({1e-6 * b:.2f})" for a, b in zip(measured, wanted, strict=True)]
            rows.append([name if number == 1 else "", f"node {number}", *ways])
    links = table(["nodes", "", "MB a step in (in theory)", "out (in theory)"], rows)
    loads = {"load average": " / ".join(str(data[part]["setting"]["load average"]) for part in PARTS)}
    where = f"The demo, {data['parameters'] / 1e6:.2f}M parameters in fp32. {words(data['far']['setting'] | loads)}."
    return f"{far}\n\n{slow}\n\n{links}\n\n{where}"


def demo_parameters() -> int:
    from safetensors import safe_open

    from examples.demo.sums import model_dir

    with safe_open(Path(model_dir()) / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


LONGER = " --rollout-n 64 --max-num-seqs 512"  # all of a step's responses find a slot
PARTS = {"far": far, "longer": lambda args: far(args, LONGER), "slow": slow, "bytes": carried}


def main(args: Args) -> None:
    data = {"parameters": demo_parameters()}
    if set(args.parts) < set(PARTS):
        data |= json.loads((RESULTS / "nodes.json").read_text())
    for part in args.parts:
        data[part] = {"args": asdict(args), "setting": setting(), "runs": PARTS[part](args)}
    write("nodes", data, tables(data))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
