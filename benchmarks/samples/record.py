"""What --record-samples costs: its share of a step on the thread that trains (timing_s/record: another thread writes), a whole
step of a run that records compared with one that does not, bytes a token, and how fast samples are packed.

python benchmarks/samples/record.py    # the demo in three modes, and packing alone: about five minutes on 2 cores
python benchmarks/samples/record.py --steps 100 --rounds 3
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tyro
from common import MODES, RESULTS, Rounds, logged, over, run, setting, table, threads_of, words, write

from rl.samples.group import Group, Response
from rl.samples.recorder import DIRECTORY, Recorder, steps_of

SIZES = {"512 x 16 x 200": (512, 16, 200), "512 x 16 x 2,000": (512, 16, 2000)}  # prompts, responses, tokens


@dataclass
class Args:
    rounds: int = 5
    """Interleaved rounds."""
    steps: int = 60
    """Training steps of each run; the first fifth is left out."""
    minutes: float = 6
    """No round begins that would end later."""
    sizes: tuple[str, ...] = tuple(SIZES)
    """Of the samples that are packed alone."""
    out: Path = RESULTS
    """Directory for record.json and record.md."""


def one_run(mode: str, steps: int, kept: str = "all") -> dict[str, float]:
    """Medians over the steps of a run: seconds of a step, and if it records the share of the step, ms, and bytes a token,
    prompts once a group. kept: the value of --record-samples."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--total-training-steps", str(steps), "--test-freq", "0", "--record-samples", kept, "--output-dir", folder]
        run([sys.executable, *MODES[mode], *flags], threads_of(MODES[mode]))
        (directory,) = Path(folder).iterdir()
        rows = logged(directory / "metrics.jsonl")
        size = sum(file.stat().st_size for file in steps_of(directory / DIRECTORY))
    late = [row for row in rows if row["step"] > steps // 5]
    step = {"step": statistics.median(row["timing_s/step"] for row in late)}
    if kept == "off":
        return step
    tokens = sum(row["response_length/mean"] * 64 + row["prompt_length/mean"] * 8 for row in rows)  # 8 groups of 8
    return step | {
        "share": statistics.median(row["timing_s/record"] / row["timing_s/step"] for row in late),
        "ms": 1e3 * statistics.median(row["timing_s/record"] for row in late),
        "bytes": size / tokens,
    }


def packing(prompts: int, n: int, length: int) -> dict[str, float]:
    """Seconds and bytes a token of one step's samples: ids like a tokenizer's (the rarer the higher), random log-probs."""
    rng, seconds, tokens = np.random.default_rng(0), 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), 0, True)
        for ticket in range(prompts):  # a step at a time would need memory for all
            ids = np.minimum(rng.zipf(1.2, (n, length)), 150_000).astype(np.int32)
            log_probs, versions = -rng.exponential(0.5, (n, length)).astype(np.float32), np.full(length, 7, np.int32)
            responses = [Response(*of, versions, "stop", 1.0) for of in zip(ids, log_probs, strict=True)]
            group = Group(ticket, ids[0, :100], "demo", responses)
            tokens += n * length + len(group.prompt_ids)
            started = time.perf_counter()
            recorder.write(ticket + 1, [group])
            seconds += time.perf_counter() - started
        return {
            "ns": 1e9 * seconds / tokens,
            "bytes": sum(file.stat().st_size for file in steps_of(Path(folder, DIRECTORY))) / tokens,
        }


def main(args: Args) -> None:
    here = setting()
    runs = {mode: [] for mode in MODES}
    for _ in Rounds(args.rounds, args.minutes):
        for mode in MODES:
            without = one_run(mode, args.steps, "off")["step"]
            recording = one_run(mode, args.steps)
            runs[mode].append(recording | {"of_without": recording["step"] / without})
    of = lambda mode, key: [r[key] for r in runs[mode]]  # noqa: E731
    keys = {"share": ".2%", "ms": ".2f", "of_without": ".3f", "bytes": ".1f"}
    rows = [[mode, *(over(of(mode, key), form) for key, form in keys.items())] for mode in MODES]
    packed = {size: packing(*SIZES[size]) for size in args.sizes}
    text = table(["demo", "of a step", "ms a step", "a step, of one without", "bytes a token"], rows) + "\n\n"
    text += table(
        ["a step's samples", "ns a token", "bytes a token"],
        [[s, f"{p['ns']:.0f}", f"{p['bytes']:.1f}"] for s, p in packed.items()],
    )
    write("record", {"setting": here, "runs": runs, "packing": packed}, f"{text}\n\n{words(here)}", args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
