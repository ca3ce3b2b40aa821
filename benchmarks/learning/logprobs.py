"""Log-probs and entropy of a large vocabulary in chunks, compared with holding the logits: peak memory and time.

    python benchmarks/learning/logprobs.py    # 10 minutes and 15 GB on 2 cores; writes benchmarks/results/logprobs.{json,md}

- held: logits [tokens, vocabulary] in one piece, log_softmax, gather, entropy; all of it fp32 and kept for the backward.
- chunked: `Policy` of rl/model/policy.py, which computes 256 MB of logits at a time and keeps 1 GB for the backward.
- chunked, none kept: the same where memory is to be saved (--gradient-checkpointing).
All end in the sum of the log-probs, whose gradient goes to the hidden states and to the projection; the entropy is a metric,
without gradient. Each measurement is a process of its own; its peak is the resident memory beyond the random projection and
hidden states, the gradients of both included.
"""

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from common import RESULTS, Rounds, over, ratios, setting, table, words, write
from transformers import Qwen2Config

SIDES = ("held", "chunked", "chunked, none kept")


@dataclass
class Args:
    tokens: int = 8192
    """Response tokens: the learner's default for a micro-batch."""
    vocabulary: int = 151_936
    """Qwen2.5's."""
    hidden: int = 896
    """Size of a hidden state: Qwen2.5-0.5B's."""
    rounds: int = 3
    """Measurements of each side; the first round is not counted."""
    minutes: float = 20
    """No round begins that would end later than this."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


class Given(torch.nn.Module):
    """Stands where the transformers model would, with the hidden states [tokens, hidden] given."""

    config = Qwen2Config()  # of a dense model of text

    def __init__(self, states: torch.Tensor, head: torch.nn.Module):
        super().__init__()
        self.states, self.lm_head = states, head

    def model(self, **_) -> tuple[torch.Tensor]:
        return (self.states[None],)


def resident_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def one_side(side: str, tokens: int, vocabulary: int, hidden: int) -> dict:
    """Seconds and the peak beyond the inputs, in GB; the value and a piece of the gradient, to see that all do the same."""
    from rl.model.policy import LOGITS_KEPT, Policy

    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocabulary, bias=False)
    with torch.no_grad():
        head.weight.normal_(0, 0.02)
    states = torch.randn(tokens, hidden, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    policy = Policy(Given(states, head), logits_kept=0 if "none" in side else LOGITS_KEPT)

    def forward():
        if side != "held":
            return policy({}, None, torch.arange(tokens), labels, 1.0, "metric")
        log_probs = head(states).float().log_softmax(-1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(1, labels[:, None]).squeeze(1), entropy

    before = resident_gb()
    started = time.perf_counter()
    log_prob, entropy = forward()
    middle = time.perf_counter()
    log_prob.sum().backward()
    ended = time.perf_counter()
    return {
        "forward": middle - started,
        "backward": ended - middle,
        "seconds": ended - started,
        "peak_gb": resident_gb() - before,
        "log_prob": float(log_prob.detach().double().mean()),
        "entropy": float(entropy.double().mean()),
        "gradient": float(head.weight.grad.double().norm()),
    }


def main(args: Args) -> None:
    here = setting(threads=torch.get_num_threads(), tokens=args.tokens, vocabulary=args.vocabulary, hidden=args.hidden)
    runs: dict[str, list[dict]] = {side: [] for side in SIDES}
    for number in Rounds(args.rounds, args.minutes):
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, *map(str, (args.tokens, args.vocabulary, args.hidden))]
            one = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"{side}: {one['seconds']:.1f} s, {one['peak_gb']:.2f} GB", flush=True)
            if number:
                runs[side].append(one)
    for key in ("log_prob", "entropy", "gradient"):
        values = [one[key] for of in runs.values() for one in of]
        assert max(values) - min(values) <= 1e-4 * abs(values[0]), (key, values)
    of = {
        key: {side: [one[key] for one in runs[side]] for side in SIDES} for key in ("forward", "backward", "seconds", "peak_gb")
    }
    rows = [
        [
            side,
            *(over(of[key][side]) for key in of),
            *(over(ratios(of[key][side], of[key]["held"])) for key in ("seconds", "peak_gb")),
        ]
        for side in SIDES
    ]
    head = ["side", "forward, s", "backward, s", "both, s", "peak, GB", "time over held", "memory over held"]
    text = f"{table(head, rows)}\n\n{words(here)}; interleaved rounds, median (min - max)"
    write("logprobs", {"setting": here, "runs": runs}, text, args.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        print(json.dumps(one_side(sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        main(tyro.cli(Args, description=__doc__))
