"""Nodes far apart, on slow links, and what travels between them: jobs on machines of tests/nodes.py, all on this one.

    python benchmarks/nodes.py        # writes benchmarks/results/nodes.{json,md}

Far: the learner on one node, the generator on another, with and without a delay on the generator's link. Slow: the same, the
link limited; a step's generation and training are what each side says it worked, the link's time is the bytes that it carried
over its rate. Bytes: of each node's link, heads and handshakes included, against what the weights and the samples have.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from common import ROOT, over, ratios, setting, table, words, write

sys.path.insert(0, str(ROOT / "tests"))
from nodes import Network

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
    flags: str = ""
    """More flags for the scripts."""


@dataclass
class Measured:
    seconds: float  # of a step
    generating: float  # a generator's work for it
    training: float  # a learner's
    traffic: list[tuple[float, float]]  # by node: bytes a step that came in over its link, and that went out
    tokens: float  # of the step's responses
    prompts: float  # of its prompts, each once
    responses: int


def measure(script: str, layout: list[tuple[int, int]], args: Args, delay: float = 0.0, mbit: float = 0.0) -> Measured:
    """One run. delay, mbit: of the last node's link."""
    with tempfile.TemporaryDirectory() as out, Network(len(layout), delays=[0.0] * (len(layout) - 1) + [delay / 2]) as network:
        if mbit:
            network.nodes[-1].shape(mbit)
        flags = ["--total-training-steps", args.steps, "--test-freq", 0, "--save-freq", 0, "--output-dir", out]
        flags += ["--experiment-name", "run", *args.flags.split()]
        job = network.start([(n, [script, *flags, "--generators", g]) for n, g in layout], fresh=True)
        counted, begin = {}, args.steps // 4
        while len(counted) < 2:
            rows, ended = read(Path(out) / "run" / "metrics.jsonl"), any(p.poll() is not None for p in job.processes)
            step = rows[-1]["step"] if rows else 0
            if step >= (begin if not counted else args.steps - 2):
                counted[step] = [node.traffic() for node in network.nodes]
            elif ended:
                raise RuntimeError("\n".join(console for _, console in job.wait(60)))
            time.sleep(2e-3)
        assert all(code == 0 for code, _ in job.wait(120))
        rows = read(Path(out) / "run" / "metrics.jsonl")
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


def read(path: Path) -> list[dict]:
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # it is being written
                rows.append(json.loads(line))
    return rows


def far(args: Args) -> tuple[dict, str]:
    layout, found, rows = LAYOUTS["a node learns, one generates"], {}, []
    for script in ("train_one_step_off.py", "train_async.py"):
        sides = {0.0: [], args.delay: []}
        for _ in range(args.rounds):
            for delay, its in sides.items():
                its.append(measure(script, layout, args, delay=delay).seconds)
                print(f"{script}, {1e3 * delay:.0f} ms: {its[-1]:.3f} s a step", flush=True)
        near, away = sides.values()
        rows.append([script, over(near, ".3f"), over(away, ".3f"), over(ratios(away, near))])
        found[script] = {"near": near, "far": away}
    return found, table(["", "s a step", f"{1e3 * args.delay:.0f} ms apart", "ratio"], rows)


def slow(args: Args) -> tuple[dict, str]:
    its = [measure("train_async.py", LAYOUTS["a node learns, one generates"], args, mbit=args.mbit) for _ in range(args.rounds)]
    links = [8e-6 * max(one.traffic[-1]) / args.mbit for one in its]
    most = [max(one.generating, one.training, link) for one, link in zip(its, links, strict=True)]
    steps = [one.seconds for one in its]
    columns = [[one.generating for one in its], [one.training for one in its], links, steps]
    row = [*(over(column, ".3f") for column in columns), over(ratios(steps, most))]
    return {"runs": list(map(asdict, its))}, table(
        ["generating, s a step", "training", f"the link at {args.mbit:g} Mbit/s", "step", "over the longest"], [row]
    )


def carried(args: Args) -> tuple[dict, str]:
    found, rows = {}, []
    parameters = demo_parameters()
    for name, layout in LAYOUTS.items():
        one = measure("train_async.py", layout, args)
        found[name] = asdict(one)
        samples = TOKEN_BYTES * one.tokens + RESPONSE_BYTES * one.responses + 4 * one.prompts
        for number, ((ranks, generators), (came, went)) in enumerate(zip(layout, one.traffic, strict=True), 1):
            what = f"{ranks - generators} learn, {generators} generate"
            rows.append(
                [name, f"node {number}: {what}", *(f"{1e-6 * of:.2f}" for of in (came, went, 4e0 * parameters, samples))]
            )
    head = ["", "", "MB a step in", "out", "the weights (fp32)", "the samples"]
    return found, table(head, rows)


def demo_parameters() -> int:
    from safetensors import safe_open

    from rl.demo import model_dir

    with safe_open(Path(model_dir()) / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def main(args: Args) -> None:
    data, texts, under = {"args": asdict(args)}, [], setting()
    for name, part in (("Far", far), ("Slow", slow), ("Bytes", carried)):
        data[name.lower()], text = part(args)
        texts.append(f"{name}:\n\n{text}\n")
    data["setting"] = under
    write("nodes", data, "\n".join([*texts, f"The demo's model. {words(under)}."]))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
