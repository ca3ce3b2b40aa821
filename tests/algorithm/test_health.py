"""Warnings: the run prints each kind once, with its count, and records it as a metric. A healthy step causes no warning."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import train

import train_sync
from rl import parts
from rl.algorithm.health import Health
from rl.learning.batch import Batch
from rl.samples.group import Group, Response


def group(ticket: int, scores: list[float], reason: str = "stop") -> Group:
    tokens = np.array([5, 1], np.int32)
    responses = [Response(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), reason, score) for score in scores]
    return Group(ticket, tokens, "demo", responses)


def batch(*groups: Group, signal: bool = True) -> Batch:
    made = Batch.of(list(groups))
    made.targets.advantage = torch.full((len(made.token),), float(signal))
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


class DetailedRecord(Record):
    """A record that also keeps the details of warnings."""

    def __init__(self):
        super().__init__()
        self.details: list[tuple[str, str]] = []

    def warn(self, what: str, count: int, detail: str) -> None:
        super().warn(what, count, detail)
        if count:
            self.details.append((what, detail))


def look(
    of: Batch, skipped: int = 0, job: Job | None = None, record: Record | None = None, more: dict | None = None, **flags
) -> tuple[dict, list]:
    record = record or Record()
    health = Health(parts.make(train_sync.Args, **flags), job or Job(), record, skipped=2)
    health.at_start()
    return health.of_step(7, of, {"actor/skipped_steps": 2 + skipped} | (more or {})), record.said


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
    of.targets.rejected = torch.isin(of.seq, torch.tensor(responses))
    return of


LEFT = {  # one of a group's responses alone is trained in 2 groups: how the others were lost
    "not scored": lambda: batch(
        group(0, [1.0, None, None]), group(1, [None, 0.0]), group(2, [None, 0.0, 1.0]), group(3, [None])
    ),
    "rejected": lambda: rejected([1, 2, 3, 4, 6, 7, 8], batch(*(group(t, [0.0, 1.0, 1.0]) for t in range(3)))),
    "both": lambda: rejected([0, 4], batch(group(0, [0.0, 1.0]), group(1, [None, 1.0]), group(2, [0.0, 1.0, 1.0]))),
}


@pytest.mark.parametrize("lost", LEFT)
def test_the_only_trained_response_of_a_group_is_reported(lost):
    """grpo gives such a response its raw score. Estimators that give it 0 cause no warning."""
    metrics, said = look(LEFT[lost]())
    assert metrics["warnings/single_response_groups"] == 2 and said == [("groups with one trained response", 2)]
    for estimator in ("rloo", "dr_grpo", "reinforce_pp"):
        assert not look(LEFT[lost](), adv_estimator=estimator)[1]


# Groups whose scores give no signal, by what took it: each is (scores, finish reason, the responses that were rejected).
EQUAL = ([1.0, 1.0, 1.0], "stop", ())
REJECTED = ([0.0, 1.0, 1.0], "stop", (0,))  # the only one that differs
WHOLE = ([0.0, 1.0, 1.0], "stop", (0, 1, 2))
UNSCORED = ([None, None, 1.0], "stop", ())
TRUNCATED = ([0.0, 0.0, 0.0], "length", ())


def without_signal(*groups: tuple, weights: bool = False) -> Batch:
    """A batch of these groups, rejected by the mask, or by weights of 0, without any advantage that counts."""
    made = Batch.of([group(t, scores, reason) for t, (scores, reason, _) in enumerate(groups)])
    number, lost = 0, []
    for scores, _, of_group in groups:
        lost += [number + i for i in of_group]
        number += sum(score is not None for score in scores)
    gone = torch.isin(made.seq, torch.tensor(lost, dtype=torch.long))
    made.targets.advantage = torch.zeros(len(made.token))
    if weights:
        made.targets.is_weight = (~gone).float()
        made.targets.advantage[gone] = 1.0  # of tokens that the loss does not count
    else:
        made.targets.rejected = gone
    return made


@pytest.mark.parametrize("weights", [False, True], ids=["mask", "weights of 0"])
@pytest.mark.parametrize(
    ("groups", "chief", "expected"),
    [
        ([EQUAL] * 2, "equal_scores", "2 of 2 groups: all scores are equal. Prompts may be too easy"),
        ([REJECTED] * 2, "rejected", "2 of 2 groups: scores differ, but --rollout-rs"),
        ([WHOLE] * 2, "rejected", "2 of 2 groups: scores differ, but --rollout-rs"),
        ([UNSCORED] * 2, "unscored", "2 of 2 groups: too few responses could be scored. Correct the reward function"),
        ([TRUNCATED, EQUAL, TRUNCATED], "truncated", "2 of 3 groups: every response ran into --max-response-length"),
        ([REJECTED, EQUAL, WHOLE, EQUAL, REJECTED], "rejected", "3 of 5 groups: scores differ"),
        ([EQUAL, EQUAL, WHOLE, TRUNCATED], "rejected", "1 of 4 groups: scores differ, but --rollout-rs"),
        ([EQUAL, UNSCORED, EQUAL], "equal_scores", "1 of 3 groups: too few responses could be scored"),
        ([([None] * 3, "stop", ())] * 2, "unscored", "2 of 2 groups: too few responses could be scored"),
        ([([1.0, 1.0, 1.0], "stop", (0, 1, 2))], "equal_scores", "1 of 1 groups: all scores are equal"),
    ],
)
def test_a_step_without_signal_names_its_cause(groups, chief, expected, weights):
    record = DetailedRecord()
    metrics, _ = look(without_signal(*groups, weights=weights), record=record)
    named = {name: count for name, count in metrics.items() if name.startswith("warnings/no_signal")}
    assert named == {"warnings/no_signal_steps": 1, f"warnings/no_signal/{chief}": 1}
    (text,) = [detail for what, detail in record.details if what.startswith("steps without any signal")]
    assert text.startswith("In step 7, ") and expected in text
    assert ("reward broken" in text) == (chief == "equal_scores"), "the reward is blamed for equal scores alone"


def test_an_estimator_without_groups_looks_at_the_whole_batch():
    differ = [([1.0, 1.0], "stop", ()), ([0.0, 0.0], "stop", (0, 1))]  # reinforce_pp compares the groups with each other
    for groups, chief in ((differ, "rejected"), ([EQUAL, EQUAL], "equal_scores")):
        metrics, _ = look(without_signal(*groups), adv_estimator="reinforce_pp")
        assert metrics[f"warnings/no_signal/{chief}"] == 1
    made = without_signal(EQUAL, EQUAL)
    made.baseline = torch.tensor([1.0] * 6)  # ReMax: the greedy response has the same score
    assert look(made, adv_estimator="remax")[0]["warnings/no_signal/equal_scores"] == 1
    made = without_signal(WHOLE)
    made.baseline = torch.zeros(3)
    assert look(made, adv_estimator="remax")[0]["warnings/no_signal/rejected"] == 1


def test_what_could_not_be_scored_and_counts_as_0_is_not_blamed_on_equal_scores():
    """--on-reward-error zero."""
    tokens = np.array([5, 1], np.int32)
    of_one = (tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", 0.0, {}, "timeout: no score after 10 s")
    made = batch(Group(0, tokens, "demo", [Response(*of_one) for _ in range(4)]), signal=False)
    assert look(made)[0]["warnings/no_signal/unscored"] == 1


@pytest.mark.parametrize(("lost", "warned"), [(1, 0), (7, 0), (8, 1), (10, 1)])
def test_a_step_of_which_nearly_all_is_rejected_says_so(lost, warned):
    made = batch(*(group(t, [0.0, 1.0]) for t in range(5)))
    record = DetailedRecord()
    metrics, _ = look(rejected([*range(lost)], made), adv_estimator="rloo", record=record)
    assert metrics.get("warnings/rejected", 0) == warned
    expected = f"In step 7 {lost * 10}% of the tokens, {lost} responses as a whole. Widen"
    assert any(text.startswith(expected) for _, text in record.details) == warned


@pytest.mark.parametrize("effective", [0.02, 0.29, 0.31, 1.0])
def test_importance_weights_that_rest_on_few_tokens(effective):
    made, record = batch(*SOUND), DetailedRecord()
    metrics, _ = look(made, record=record, more={"rollout_corr/rollout_is_eff_sample_size": effective})
    assert metrics.get("warnings/few_effective", 0) == (effective < 0.3) == len(record.details)
    assert all(f"In step 7 it is {effective:.0%}" in text for _, text in record.details)


@pytest.mark.runs
def test_a_run_whose_responses_are_rejected_blames_the_bounds(tmp_path):
    """The accepted band is far from every ratio, so no token is trained, whatever the scores are."""
    flags = ["--rollout-rs", "seq_mean_k1", "--rollout-rs-threshold", "7_8", "--total-training-steps", "3", "--test-freq", "0"]
    metrics, _, done = train("train_sync.py", *flags, "--temperature", "1.3", out=tmp_path, ranks=2)
    assert [metrics[step]["actor/grad_norm"] for step in (1, 2, 3)] == [0, 0, 0]
    assert metrics[3]["warnings/no_signal/rejected"] == metrics[3]["warnings/rejected"] == 3
    (line,) = [line for line in done.stdout.splitlines() if "without any signal" in line]
    assert "rejection: 1 so far. In step 1, " in line and "Widen the bounds" in line and "reward" not in line
    assert "rejects nearly all: 1 so far. In step 1 100% of the tokens" in done.stdout


def test_what_is_asked_for_is_no_cause_to_warn():
    """REINFORCE++ has no groups."""
    assert not look(batch(group(0, [1.0]), group(1, [0.0])), rollout_n=1, adv_estimator="reinforce_pp")[1]


@pytest.mark.runs
def test_a_run_says_it_once_and_records_it(tmp_path):
    flags = ["--top-p", "0.9", "--truncation", "left", "--max-prompt-length", "4", "--max-response-length", "1"]
    metrics, _, done = train("train_sync.py", "--total-training-steps", "3", "--test-freq", "0", *flags, out=tmp_path)
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning:")]
    assert sum("--top-p" in line for line in warnings) <= 2, "64 responses a step: when they begin, and from 100 on"
    assert sum("training prompts longer than --max-prompt-length" in line for line in warnings) == 1
    endless = sum(metrics[step]["response_length/clip_ratio"] == 1 for step in (1, 2, 3))  # an end token may be drawn
    assert sum("ran into --max-response-length: 1 so far" in line for line in warnings) == bool(endless)
    assert metrics[3]["warnings/endless_steps"] == endless and metrics[3]["warnings/truncated_sampling"] == 3 * 64


def test_a_skipped_update_says_how_to_look_for_the_cause():
    record = DetailedRecord()
    look(batch(*SOUND), skipped=1, record=record)
    ((what, detail),) = record.details
    assert what == "optimizer steps skipped" and "python replay.py RUN --from-step 7" in detail
