"""Warnings: each kind is said once, with its count, and is a metric; a sound step says nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import train

import train_sync
from rl.batch import Batch, Group, Response
from rl.health import Health


def group(ticket: int, scores: list[float], reason: str = "stop") -> Group:
    tokens = np.array([5, 1], np.int32)
    responses = [Response(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), reason, score) for score in scores]
    return Group(ticket, tokens, "demo", responses)


def batch(*groups: Group, signal: bool = True) -> Batch:
    made = Batch.of(list(groups))
    made.advantage = torch.full((len(made.token),), float(signal))
    return made


@dataclasses.dataclass
class Prompts:
    truncated: int = 0


@dataclasses.dataclass
class Job:
    prompts: Prompts = dataclasses.field(default_factory=Prompts)
    val_prompts: Prompts | None = None


class Record:
    def __init__(self):
        self.said: list[tuple[str, int]] = []

    def warn(self, what: str, count: int, detail: str) -> None:
        if count:
            self.said.append((what, count))
        assert not count or detail.endswith(".")


def look(of: Batch, skipped: int = 0, job: Job | None = None, **flags) -> tuple[dict, list]:
    record = Record()
    health = Health(train_sync.Args(**flags), job or Job(), record, skipped=2)
    health.at_start()
    seen = {"critic/advantages/max": float(of.advantage.max()), "critic/advantages/min": float(of.advantage.min())}
    return health.of_step(7, of, seen | {"actor/skipped_steps": 2 + skipped}), record.said


SOUND = [group(0, [0.0, 1.0]), group(1, [1.0, 1.0], "length")]


def test_a_sound_step_says_nothing():
    metrics, said = look(batch(*SOUND))
    assert not said and metrics and not any(metrics.values())


@pytest.mark.parametrize(
    ("kind", "count", "case"),
    [
        ("truncated_sampling", 4, {"of": batch(*SOUND), "top_p": 0.7}),
        ("truncated_sampling", 4, {"of": batch(*SOUND), "top_k": 5}),
        ("single_response_groups", 2, {"of": batch(group(0, [1.0]), group(1, [0.0])), "rollout_n": 1}),
        ("no_signal_steps", 1, {"of": batch(*SOUND, signal=False)}),
        ("endless_steps", 1, {"of": batch(group(0, [0.0, 1.0], "length"))}),
        ("skipped_updates", 3, {"of": batch(*SOUND), "skipped": 3}),
        ("cut_prompts", 12, {"of": batch(*SOUND), "truncation": "right", "job": Job(Prompts(5), Prompts(7))}),
    ],
)
def test_each_kind_is_counted(kind, count, case):
    metrics, said = look(**case)
    assert metrics.pop(f"warnings/{kind}") == count == sum(number for _, number in said)
    assert not any(metrics.values()), "and no other"


def rejected(responses: list[int], of: Batch) -> Batch:
    of.rejected = torch.isin(of.seq, torch.tensor(responses))
    of.mask = of.mask & ~of.rejected
    return of


LEFT = {  # one of a group's responses alone is trained in 2 groups: how the others were lost
    "not scored": lambda: batch(
        group(0, [1.0, None, None]), group(1, [None, 0.0]), group(2, [None, 0.0, 1.0]), group(3, [None])
    ),
    "rejected": lambda: rejected([1, 2, 3, 4, 6, 7, 8], batch(*(group(t, [0.0, 1.0, 1.0]) for t in range(3)))),
    "both": lambda: rejected([0, 4], batch(group(0, [0.0, 1.0]), group(1, [None, 1.0]), group(2, [0.0, 1.0, 1.0]))),
}


@pytest.mark.parametrize("lost", LEFT)
def test_a_response_that_is_left_alone_in_its_group_is_told(lost):
    """grpo gives it its raw score; the estimators that give it 0 have nothing to say."""
    metrics, said = look(LEFT[lost]())
    assert metrics["warnings/single_response_groups"] == 2 and said == [("groups with one trained response", 2)]
    for estimator in ("rloo", "dr_grpo", "reinforce_pp"):
        assert not look(LEFT[lost](), adv_estimator=estimator)[1]


def test_what_is_asked_for_is_no_cause_to_warn():
    """--ignore-eos runs every response to its budget; REINFORCE++ has no groups."""
    assert not look(batch(group(0, [0.0, 1.0], "length")), ignore_eos=True)[1]
    assert not look(batch(group(0, [1.0]), group(1, [0.0])), rollout_n=1, adv_estimator="reinforce_pp")[1]


def test_a_run_says_it_once_and_records_it(tmp_path):
    flags = ["--top-p", "0.9", "--truncation", "left", "--max-prompt-length", "4", "--max-response-length", "1"]
    metrics, _, done = train("train_sync.py", "--total-training-steps", "3", "--test-freq", "0", *flags, out=tmp_path)
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning:")]
    assert sum("--top-p" in line for line in warnings) <= 2, "64 responses a step: when they begin, and from 100 on"
    assert sum("training prompts longer than --max-prompt-length" in line for line in warnings) == 1
    endless = sum(metrics[step]["response_length/clip_ratio"] == 1 for step in (1, 2, 3))  # an end token may be drawn
    assert sum("ran into --max-response-length: 1 so far" in line for line in warnings) == bool(endless)
    assert metrics[3]["warnings/endless_steps"] == endless and metrics[3]["warnings/truncated_sampling"] == 3 * 64
