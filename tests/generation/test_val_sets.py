"""Validation files with a name or a sampling of their own."""

import itertools
import random
import statistics

import pytest
from helpers import train
from test_data import write

from math_grader import graders
from rl.algorithm.metrics import best_of, majority, validation_metrics
from rl.errors import UserError
from rl.generation.engine import SamplingArgs
from rl.generation.val_sets import ValSets
from rl.record import validations
from rl.rewards.score import as_score

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "pred": solution_str}
"""


class Rows:
    """Validation data of two rows a file."""

    def file_of(self, index: int) -> int:
        return index // 2


def test_a_file_has_the_flags_values_or_its_own():
    words = ["hard=data/aime.parquet:n=16:length=99:temperature=0.6", "a=b.jsonl", "org/name:main", "demo:top_p=0.5:n=2"]
    sets = ValSets(words, SamplingArgs(val_n=3, val_temperature=0.1, max_response_length=20))
    assert sets.files == ["data/aime.parquet", "b.jsonl", "org/name:main", "demo"]
    found = [sets.of(Rows(), 2 * file + 1) for file in range(4)]
    assert [name for name, _ in found] == ["hard", "a", "", ""]
    values = [(of.val_n, of.validation.temperature, of.validation.top_p, of.validation.max_tokens) for _, of in found]
    assert values == [(16, 0.6, 1.0, 99), (3, 0.1, 1.0, 20), (3, 0.1, 1.0, 20), (2, 0.1, 0.5, 20)] and sets.longest == 99


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a.parquet:n=0", "--val-n must be at least 1; it is 0"),
        ("a.parquet:n=few", "n and length are whole numbers"),
        ("a.parquet:length=0", "--max-response-length must be at least 1"),
        ("a.parquet:temperature=", "temperature and top_p are numbers"),
        ("x=a.parquet:top_p=2", "--val-top-p must be"),
    ],
)
def test_a_value_of_no_use_is_named(word, message):
    with pytest.raises(UserError, match=f"--val-files {word}: .*{message}"):
        ValSets([word], SamplingArgs())


def test_the_best_of_k_is_the_mean_over_all_choices():
    rng = random.Random(0)
    for n in (1, 2, 5, 8):
        accuracies = [rng.choice([0.0, 1.0, 0.3]) for _ in range(n)]
        for k in range(1, n + 1):
            chosen = [*map(max, itertools.combinations(accuracies, k))]
            assert best_of(accuracies, k) == pytest.approx(sum(chosen) / len(chosen))


def test_a_vote_is_of_the_answers_that_most_have():
    """Whatever the order of the responses: the mean over the answers that are most frequent, as a tie broken at random is on
    average; a response without an answer has no vote, unless none has one."""
    right = {"4": 1.0, "5": 0.0, "6": 0.5, None: 0.0}
    for answers in itertools.product(right, repeat=5):
        modes = statistics.multimode(answer for answer in answers if answer) or [None]
        expected = statistics.mean(right[answer] for answer in modes)
        assert majority([*answers], [right[answer] for answer in answers]) == pytest.approx(expected)


def test_the_vote_is_a_metric_of_sources_whose_grader_returns_answers():
    answers = ["4", "4", "5"], ["5", "5", "4"], ["5", None, None], [None, None, None]
    rows = []
    for index, pred in [(index, pred) for index, preds in enumerate(answers) for pred in preds]:
        row = {"index": index, "data_source": "math", "error": None, "acc": float(pred == "4"), "pred": pred}
        rows += [row, row | {"index": 10 + index, "data_source": "other", "pred": None}]
    random.Random(0).shuffle(rows)
    metrics = validation_metrics(rows)
    assert [name for name in metrics if "maj@" in name] == ["val-core/math/acc/maj@3/mean"]
    assert metrics["val-core/math/acc/maj@3/mean"] == 0.25 and metrics["val-core/math/acc/mean@3"] == 0.25
    assert validations.score(metrics) == 0.25  # not twice


@pytest.mark.parametrize(
    ("grade", "text", "pred"),
    [
        (graders.gsm8k, "eighteen", None),
        (graders.math_verify, "it is \\boxed{\\frac12}", "\\frac12"),
        (lambda *_: {"score": 1, "pred": 7}, "", "7"),
        (lambda *_: {"score": 1}, "", None),
    ],
)
def test_graders_return_answers(grade, text, pred):
    assert as_score(grade("", text, "1")).pred == pred


def test_files_of_one_source_with_different_numbers_of_responses_are_told_apart():
    rows = [
        {"index": index, "data_source": "math", "error": None, "acc": float(i == 0)}
        for index, n in ((0, 1), (1, 4), (2, 4))
        for i in range(n)
    ]
    metrics = validation_metrics(rows)
    assert metrics["val-core/math/acc/mean@1"] == 1
    assert metrics["val-core/math/acc/mean@4"] == 0.25
    assert metrics["val-core/math/acc/pass@2"] == 0.5 and metrics["val-core/math/acc/pass@4"] == 1
    assert "val-core/math/acc/pass@1" not in metrics


@pytest.mark.runs
def test_a_run_validates_each_file_in_its_own_way(tmp_path):
    rows = [{"prompt": f"{a}+{a}=", "data_source": "demo", "ground_truth": str(2 * a)} for a in range(1, 4)]
    file = write(tmp_path / "sums.jsonl", *rows)
    sets = [f"one={file}", f"many={file}:n=4:temperature=1:length=70", f"{file}:n=2"]  # longer than in training: 64 + 8
    (tmp_path / "reward.py").write_text(REWARD)
    flags = ["--total-training-steps", 1, "--test-freq", 1, "--no-val-before-train", "--val-files", *sets]
    flags += ["--reward", f"{tmp_path / 'reward.py'}:score"]
    metrics, run, _ = train("train_one_step_off.py", *flags, out=tmp_path / "runs", ranks=2)
    names = {name for name in metrics[1] if name.startswith("val-core/")}
    of_many = {"many/acc/mean@4", "many/acc/pass@2", "many/acc/pass@4", "many/acc/maj@4/mean"}
    of_demo = {"demo/acc/mean@2", "demo/acc/pass@2", "demo/acc/maj@2/mean"}
    assert names == {f"val-core/{name}" for name in {"one/acc/mean@1"} | of_demo | of_many}
    responses = (run / "val_generations" / "step_000001.jsonl").read_text().splitlines()
    assert len(responses) == 3 * (1 + 4 + 2)
