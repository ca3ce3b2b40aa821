"""How long view.py takes to open large records: the first page and a step of 100,000 responses, one response of 10,000 tokens.

python benchmarks/samples/view.py    # with the demo's tokenizer: under two minutes on 2 cores
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tyro
from common import RESULTS, setting, table, words, write

from rl.samples.group import Group, Response
from rl.samples.recorder import Recorder
from tools.view.answers import Answers

GROUP, PER_STEP = 8, 128  # responses to a prompt, prompts of a step


@dataclass
class Args:
    responses: int = 100_000
    """Responses of the first record."""
    tokens: int = 200
    """Tokens of each."""
    long: int = 10_000
    """Tokens of the second record's response."""
    model: str = "demo"
    """Model whose tokenizer is used."""
    out: Path = RESULTS
    """Directory for view.json and view.md."""


def record(run: Path, model: str, steps: int, groups: int, n: int, tokens: int) -> None:
    """Write a record of random tokens."""
    from transformers import AutoTokenizer

    from rl.model.pretrained import resolve

    size = len(AutoTokenizer.from_pretrained(resolve(model)))
    rng = np.random.default_rng(0)
    recorder = Recorder(run, 0, True)
    recorder.begin({"after": 0, "flags": {"model": model, "trust_remote_code": False}})
    rows = []
    for step in range(1, steps + 1):
        made = []
        for i in range(groups):
            arrays = [
                (rng.integers(0, size, tokens, np.int32), -rng.random(tokens, np.float32), np.full(tokens, step, np.int32))
                for _ in range(n)
            ]
            of_group = [Response(*its, "stop", score=float(rng.integers(2))) for its in arrays]
            made.append(Group(step * groups + i, rng.integers(0, size, 50, np.int32), "demo", of_group))
        recorder.write(step, made)
        about = {"epoch": 0, "source": "demo", "where": "demo row 1", "ground_truth": "1", "lengths": [tokens] * n}
        scores = [[r.score for r in group.responses] for group in made]
        its = [about | {"ticket": g.ticket, "index": g.ticket % 5000, "scores": s} for g, s in zip(made, scores, strict=True)]
        rows.append(json.dumps({"step": step, "groups": its}))
    (run / "groups.jsonl").write_text("\n".join(rows) + "\n")
    metrics = [json.dumps({"step": step, "critic/score/mean": 0.5}) for step in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("\n".join(metrics) + "\n")


def main(args: Args) -> None:
    seconds = {}

    def ask(answers: Answers, name: str, path: str) -> None:
        began = time.perf_counter()
        size = len(json.dumps(answers(path)))
        seconds[name] = time.perf_counter() - began
        print(f"{name}: {seconds[name]:.2f} s, {size / 2**20:.1f} MiB", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        many, long = Path(folder, "many"), Path(folder, "long")
        for run in (many, long):
            run.mkdir()
        steps = max(args.responses // (GROUP * PER_STEP), 1)
        record(many, args.model, steps, PER_STEP, GROUP, args.tokens)
        record(long, args.model, 1, 1, 1, args.long)
        began = time.perf_counter()
        answers = Answers([many])
        _ = answers.runs[0].tokenizer
        seconds["tokenizer"] = time.perf_counter() - began
        print(f"tokenizer: {seconds['tokenizer']:.2f} s", flush=True)
        ask(answers, f"{args.responses:,} responses: the first page", "runs")
        ask(answers, "a step", f"0/step/{steps}")
        ask(answers, "the same step again", f"0/step/{steps}")
        ask(answers, "search of a step", f"0/search/{steps}/12345")
        ask(answers, "words", "0/words")
        ask(answers, "prompts", "0/prompts")
        ask(Answers([long]), f"a response of {args.long:,} tokens", "0/step/1/1")
    under = setting()
    rows = [[name, f"{its:.2f}"] for name, its in seconds.items()]
    write("view", {"setting": under, "seconds": seconds}, f"{table(['answer', 'seconds'], rows)}\n\n{words(under)}.", args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
