"""Warnings: the run prints each kind once, with its count, and records it as a metric; a healthy step causes none. Counters by
data source: every script counts each response of a settled ticket once. Text that repeats itself or copies its prompt, whether
it pays, and the warnings when it begins to."""

import dataclasses
import json
import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_group, run_script
from test_data import write

import train_async
import train_sync
from rl import parts
from rl.algorithm.health import WINDOW, Health, text_metrics
from rl.algorithm.metrics import KINDS, Fates
from rl.learning.batch import Batch
from rl.samples.group import Group, Response
from tools import recorded


def group(ticket: int, scores: list[float], reason: str = "stop") -> Group:
    tokens = np.array([5, 1], np.int32)
    responses = [Response(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), reason, score) for score in scores]
    return Group(ticket, tokens, "demo", responses)


def batch(*groups: Group, signal: bool = True) -> Batch:
    made = Batch.of(list(groups))
    made.targets.advantage = torch.full((len(made.token),), float(signal))
    return made


class Record:
    def __init__(self):
        self.said: list[tuple[str, int, str]] = []

    def warn(self, what: str, count: int, detail: str) -> None:
        if count:
            self.said.append((what, count, detail))
        assert not count or detail.endswith(".")


def look(of: Batch, skipped: int = 0, cut: tuple[int, ...] = (0,), more: dict | None = None, **flags) -> tuple[dict, list]:
    """Return the metrics of a step, and (what, count, detail) of each warning. cut: prompts of training, and of validation."""
    record, (prompts, *val) = Record(), [SimpleNamespace(truncated=n) for n in cut]
    job = SimpleNamespace(prompts=prompts, val_prompts=val[0] if val else None)
    health = Health(parts.make(train_sync.Args, **flags), job, record, skipped=2)
    health.at_start()
    return health.of_step(7, of, {"actor/skipped_steps": 2 + skipped} | (more or {}), Fates.of(of)), record.said


APART, ONE_APART = (f"training/rollout_probs_diff_{name}" for name in ("mean", "max"))
SOUND = [group(0, [0.0, 1.0]), group(1, [1.0, 1.0], "length")]


def test_a_sound_step_says_nothing():
    metrics, said = look(batch(*SOUND))
    assert not said and metrics and not any(metrics.values())
    alone = batch(group(0, [1.0]), group(1, [0.0]))
    assert not look(alone, rollout_n=1, adv_estimator="reinforce_pp")[1], "REINFORCE++ has no groups"


@pytest.mark.parametrize("flags", [{"dtype": "bfloat16"}, {"rollout_dtype": "bfloat16"}, {"use_rollout_log_probs": True}])
def test_single_tokens_may_differ_by_rounding_and_after_an_update(flags):
    assert not look(batch(*SOUND), more={ONE_APART: 0.2}, **({"dtype": "float32"} | flags))[1]


def test_stale_samples_may_have_other_probabilities():
    args, record = parts.make(train_async.Args), Record()
    job = SimpleNamespace(prompts=SimpleNamespace(truncated=0), val_prompts=None)
    stale = batch(*SOUND)
    Health(args, job, record, skipped=0).of_step(1, stale, {"actor/skipped_steps": 0, APART: 0.2}, Fates.of(stale))
    assert not record.said


@pytest.mark.parametrize(
    ("kind", "count", "case"),
    [
        ("truncated_sampling", 4, {"of": batch(*SOUND), "top_p": 0.7}),
        ("truncated_sampling", 4, {"of": batch(*SOUND), "top_k": 5}),
        ("truncated_sampling", 4, {"of": batch(*SOUND), "top_k": 5, "more": {APART: 0.2}}),
        ("different_policy", 1, {"of": batch(*SOUND), "more": {APART: 0.06}}),
        ("different_policy", 1, {"of": batch(*SOUND), "more": {ONE_APART: 0.2}, "dtype": "float32"}),
        ("single_response_groups", 2, {"of": batch(group(0, [1.0]), group(1, [0.0])), "rollout_n": 1}),
        ("no_signal_steps", 1, {"of": batch(*SOUND, signal=False)}),
        ("endless_steps", 1, {"of": batch(group(0, [0.0, 1.0], "length"))}),
        ("skipped_updates", 3, {"of": batch(*SOUND), "skipped": 3}),
        ("cut_prompts", 12, {"of": batch(*SOUND), "truncation": "right", "cut": (5, 7)}),
    ],
)
def test_each_kind_is_counted(kind, count, case):
    metrics, said = look(**case)
    assert metrics.pop(f"warnings/{kind}") == count == sum(number for _, number, _ in said)
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
    assert metrics["warnings/single_response_groups"] == 2
    assert [of[:2] for of in said] == [("groups with one trained response", 2)]
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
        ([([1.0, 1.0], "stop", ())], "equal_scores", "1 of 1 groups: all scores are equal"),
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
    metrics, said = look(without_signal(*groups, weights=weights))
    named = {name: count for name, count in metrics.items() if name.startswith("warnings/no_signal")}
    assert named == {"warnings/no_signal_steps": 1, f"warnings/no_signal/{chief}": 1}
    (text,) = [detail for what, _, detail in said if what.startswith("steps without any signal")]
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


@pytest.mark.parametrize(("lost", "warned"), [(1, 0), (7, 0), (8, 1), (10, 1)])
def test_a_step_of_which_nearly_all_is_rejected_says_so(lost, warned):
    made = batch(*(group(t, [0.0, 1.0]) for t in range(5)))
    metrics, said = look(rejected([*range(lost)], made), adv_estimator="rloo")
    assert metrics.get("warnings/rejected", 0) == warned
    expected = f"In step 7 {lost * 10}% of the tokens, {lost} responses as a whole. Widen"
    assert any(text.startswith(expected) for *_, text in said) == warned


REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    if data_source == "broken":
        raise ValueError("no score here")
    return 1.0 if data_source == "equal" else float(sum(map(ord, solution_str)) % 7)
"""


def counted(row: dict) -> dict[str, Counter]:
    """source -> kind -> count, of a line of metrics.jsonl."""
    out: dict[str, Counter] = {}
    for name, value in row.items():
        if name.startswith("data/"):
            source, _, kind = name.removeprefix("data/").rpartition("/")
            out.setdefault(source, Counter())[kind] = value
    return out


COUNTED = {
    "sync, filtered": ("train_sync.py", ["--filter-groups"], 2),
    "one step off, rejected": ("train_one_step_off.py", ["--rollout-rs", "seq_mean_k1", "--rollout-rs-threshold", "7_8"], 2),
    "async, too old": ("train_async.py", ["--max-staleness", "0", "--staleness-threshold", "2"], 3),
}


@pytest.mark.runs
@pytest.mark.parametrize("case", COUNTED)
def test_every_response_is_counted_once(case, tmp_path):
    """And recorded once, among those that are trained or with the reason why not."""
    script, flags, ranks = COUNTED[case]
    sources = enumerate(["mixed", "equal", "broken", "mixed"] * 8)
    rows = [{"data_source": source, "prompt": f"{i % 9}+{i % 7}=", "ground_truth": "1"} for i, source in sources]
    data = write(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "reward.py").write_text(REWARD)
    size = ["--ppo-mini-batch-size" if script == "train_async.py" else "--train-batch-size", "4"]
    words = ["--train-files", data, "--reward", f"{tmp_path / 'reward.py'}:score", "--test-freq", "0", "--rollout-n", "4"]
    words += ["--total-training-steps", "4", *size, "--temperature", "1.5", "--max-num-gen-batches", "3"]
    words += ["--output-dir", tmp_path / "runs", "--experiment-name", "run"]
    run_script(script, *words, *flags, ranks=ranks)
    run = tmp_path / "runs" / "run"
    lines = {name: (run / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "tickets", "groups")}
    record = recorded.Record(run)
    for tickets, of_step in zip(map(json.loads, lines["tickets"]), map(json.loads, lines["groups"]), strict=True):
        step = tickets.pop("step")
        told = {}
        for group in of_step["groups"]:
            told.setdefault(group.get("left_out", "trained"), []).append(group["ticket"])
        assert {reason: sorted(its) for reason, its in told.items()} == {
            reason: sorted(its) for reason, its in tickets.items() if its
        }
        left_out = [group.ticket for group in record.left_out(step)]
        assert [group.ticket for group in record.groups(step)] + left_out == [group["ticket"] for group in of_step["groups"]]
    steps = [counted(json.loads(line)) for line in lines["metrics"]]
    total = Counter()
    for step, line in zip(steps, map(json.loads, lines["tickets"]), strict=True):
        assert set(step) == {"mixed", "equal", "broken"} and all(set(of) == set(KINDS) for of in step.values())
        settled = sum(len(tickets) for name, tickets in line.items() if name != "step")
        assert sum(of.total() for of in step.values()) == 4 * settled
        for of in step.values():
            total += of
        assert not step["broken"]["trained"] and not step["equal"]["unscored"]
    lost = {source: sum((step[source] for step in steps), Counter()) for source in ("broken", "equal")}
    if "filtered" in case:
        assert lost["equal"]["filtered"] and lost["broken"]["filtered"], "neither has a signal"
    else:
        assert lost["broken"]["unscored"]
    if "rejected" in case:
        assert total["rejected"] > 0 and not total["trained"]
    else:
        assert total["trained"] > 0 and not total["rejected"]


def test_a_response_with_one_trained_token_is_trained_and_one_without_is_rejected():
    batch = Batch.of([make_group(0, [2, 2, 2, 2])])
    batch.targets.advantage = torch.ones(8)
    batch.targets.rejected = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0]).bool()
    batch.targets.is_weight = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 2])
    fates = Fates.of(batch)
    assert fates.trained.tolist() == [True, False, False, True] and fates.rejected.tolist() == [False, True, True, False]
    assert fates.rejected_share == pytest.approx(6 / 8)


# ---------------------------------------------------------------------------------------------------------------- texts


def response(text: str, score: float | None = 0.0, mask: str | None = None) -> Response:
    """A response with a token for each letter. mask: a letter "x" where the policy sampled it."""
    n = len(text)
    ids = np.array([ord(letter) for letter in text], np.int32)
    mask = None if mask is None else np.array([letter == "x" for letter in mask])
    return Response(ids, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop", score, mask=mask)


def talk(prompt: str, *responses: Response) -> Group:
    return Group(0, np.array([ord(letter) for letter in prompt], np.int32), "d", list(responses))


PROMPT = "How much is 12 plus 34?"


def test_random_texts_are_as_a_count_by_strings_says(ranks):
    letters = random.Random(0)
    text = lambda: "".join(letters.choices("abc", k=letters.randrange(1, 60)))  # noqa: E731
    for _ in range(30):
        prompt, texts = text(), [text() for _ in range(5)]
        found = text_metrics([talk(prompt, *map(response, texts))], ranks)
        repeated, copied = [], []
        for one in texts:
            fours = [one[i : i + 4] for i in range(len(one) - 3)]
            repeated.append(sum(four in fours[:i] for i, four in enumerate(fours)) / len(fours) if fours else 0)
            eights = [one[i : i + 8] for i in range(len(one) - 7)]
            copied.append(sum(eight in prompt for eight in eights) / len(eights) if eights else 0)
        assert found["text/repeated/mean"] == pytest.approx(sum(repeated) / 5)
        assert found["text/copied/mean"] == pytest.approx(sum(copied) / 5)
        assert found["text/distinct"] == len({*texts}) / 5


def test_it_shows_whether_repeating_pays(ranks):
    """By the group's own mean: the second group scores more as a whole."""
    pays = talk(PROMPT, response("a" * 20, 1.0), response("abcdefgh", 0.0), response("zyxwvuts", 0.0))
    not_scored = response("b" * 20, None)
    other = talk(PROMPT, response("mnopqrst", 5.0), response("c" * 20, 6.0), not_scored)
    found = text_metrics([pays, other], ranks)
    assert found["text/repeated/better"] == pytest.approx(16 / 17) and found["text/repeated/worse"] == 0
    assert math.isnan(text_metrics([talk(PROMPT, response("a", 1.0))], ranks)["text/copied/better"]), "no score differs"


@pytest.mark.parametrize("learners", [2, 3, 5])
def test_learners_share_the_work(ranks, monkeypatch, learners):
    """The numbers do not depend on how many there are, to the bit."""
    groups = [make_group(ticket, [30, 40, 50]) for ticket in range(7)]
    expected = text_metrics(groups, ranks)
    parts = []
    monkeypatch.setattr("rl.algorithm.health.dist.all_gather_values", lambda own: parts.append(own) or parts)
    for rank in range(learners):
        found = text_metrics(groups, dataclasses.replace(ranks, rank=rank, world_size=learners))
    assert found == expected


@pytest.fixture
def health():
    return Health(train_sync.Args(), SimpleNamespace(), Record(), skipped=0)


def text_step(share: str, mean: float, better: float, worse: float, score: float) -> dict[str, float]:
    shares = {f"text/{name}/{which}": 0.0 for name in ("repeated", "copied") for which in ("mean", "better", "worse")}
    its = {f"text/{share}/mean": mean, f"text/{share}/better": better, f"text/{share}/worse": worse}
    return shares | its | {"critic/score/mean": score}


@pytest.mark.parametrize("share", ["repeated", "copied"])
@pytest.mark.parametrize(
    ("last", "warns"),
    [
        ((0.3, 0.35, 0.2, 0.8), True),
        ((0.3, 0.2, 0.35, 0.8), False),  # it does not pay
        ((0.3, 0.35, 0.2, 0.4), False),  # the score has not risen
        ((0.1, 0.35, 0.2, 0.8), False),  # it is as frequent as before
        ((0.3, math.nan, 0.2, 0.8), False),
    ],
)
def test_a_warning_if_it_becomes_frequent_and_pays(health, share, last, warns):
    for number in range(WINDOW):
        health._warn_of_texts(number, text_step(share, 0.05, 0.05, 0.05, 0.5))
    for number in range(WINDOW, 2 * WINDOW):
        assert not health.record.said
        health._warn_of_texts(number, text_step(share, *last))
    said = health.record.said
    assert bool(said) == warns and health.counts[f"more_{share}"] == warns
    if warns:
        assert said[0][0] == f"steps in which {share} text has become frequent and scores well"
        assert "was 0.05 in the first 20 steps, and 0.30" in said[0][2]


@pytest.mark.parametrize(
    ("accuracies", "scores", "warns"),
    [
        ((0.8, 0.6, 0.4), (0.1, 0.2), True),
        ((0.8, 0.6, 0.4), (0.2, 0.1), False),  # training falls as well
        ((0.8, 0.4, 0.6), (0.1, 0.2), False),  # it has recovered
        ((0.5, 0.49, 0.48), (0.1, 0.2), False),  # that may be chance
    ],
)
def test_a_warning_if_validation_falls_while_training_rises(health, accuracies, scores, warns):
    """Of one source; the other one's validation rises."""
    for number, accuracy in enumerate(accuracies):
        if number:
            score = {"d": scores[number - 1], "other": 0.0}
            health._scores += [(10 * number - 9, score), (10 * number, score)]
        rows = [{"data_source": "d", "acc": float(i < 100 * accuracy)} for i in range(100)]
        rows += [{"data_source": "other", "acc": float(i < number)} for i in range(100)]
        health.of_validation(10 * number, [*rows, {"data_source": "d", "acc": None}])
    assert len(health.record.said) == warns == health.counts["validation_falls"]
    if warns:
        detail = health.record.said[0][2]
        assert detail.startswith("d: 0.800, 0.600, 0.400 after steps 0, 10 and 20") and "from 0.100 to 0.200" in detail
