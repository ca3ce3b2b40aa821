"""Responses that could not be scored take no part in the loss, in a baseline or in a mean. If no response of a run can be
scored, the run ends with the reward function's own error."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from checkpoints import bits_of, damage
from helpers import run_script, train
from test_data import write
from trainer import ESTIMATORS, Trainer, learn_and_report

import train_sync
from rl import parts
from rl.algorithm.metrics import validation_metrics
from rl.checkpoint.saver import Best
from rl.data.prompts import Prompt
from rl.generation.engine import Output
from rl.generation.generator import Generator, Key, OpenGroup, Responses
from rl.learning.batch import Batch
from rl.record import validations
from rl.rewards.score import Score, ScoringEvents
from rl.samples.group import Group
from rl.training_run import TrainingRun


def learn(trainer: Trainer, groups: list[Group], **flags) -> tuple[dict, torch.Tensor]:
    """(metrics, weights) after one step on the groups, from the model's own weights and a new optimizer."""
    trainer.begin_again()
    trainer.learner.optimizer.state.clear()
    args = parts.replace(trainer.args, **flags)
    trainer.learner.args = args.learner
    metrics = learn_and_report(args, trainer.learner, Batch.of(groups))
    del metrics["actor/updated_steps"]  # of all steps that this learner has taken
    return metrics, trainer.weights()


@pytest.fixture(scope="module")
def groups(trainer):
    trainer.engine.update(trainer.learner.weights(), version=0)
    made = train_sync.make_batch(trainer.args, trainer.generator(trainer.args), 0)[0]
    spread = lambda g: [dataclasses.replace(r, score=float((i * 7 + g.ticket) % 3)) for i, r in enumerate(g.responses)]  # noqa: E731
    return [dataclasses.replace(group, responses=spread(group)) for group in made]


def unscored(group: Group, numbers) -> Group:
    responses = [
        dataclasses.replace(r, score=None, error="died: x") if i in numbers else r for i, r in enumerate(group.responses)
    ]
    return dataclasses.replace(group, responses=responses)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gae"])
def test_they_change_nothing(trainer, groups, estimator):
    """The step equals bit for bit a step without those responses, for every estimator and denominator."""
    flags = {"adv_estimator": estimator, "loss_agg_mode": "seq-mean-token-sum"}
    holes = [unscored(groups[0], {0, 2}), unscored(groups[1], {0, 1, 2, 3}), *groups[2:]]
    without = [dataclasses.replace(g, responses=[r for r in g.responses if r.score is not None]) for g in holes]
    metrics, weights = learn(trainer, holes, **flags)
    expected, expected_weights = learn(trainer, without, **flags)
    assert metrics.pop("reward/unscored") == 6 and expected.pop("reward/unscored") == 0
    assert metrics == expected and torch.equal(weights, expected_weights)
    zero = [unscored(groups[0], set()), *groups[1:]]
    assert not torch.equal(weights, learn(trainer, zero, **flags)[1]), "the groups would teach"


@pytest.fixture
def generator() -> Generator:
    """What a generator needs for its records."""
    bare = Generator.__new__(Generator)
    bare.args = train_sync.Args()
    bare.job = SimpleNamespace(val_sets=None, environments=None, tokenizer=SimpleNamespace(decode=lambda *_, **__: "text"))
    bare.responses = Responses(engine=None)
    return bare


def work_of(scores: list[Score], outputs: list[Output] = (), source: str = "demo", greedy: bool = False) -> OpenGroup:
    """A prompt with these scores. By default all responses are the same two tokens."""
    outputs = outputs or [Output((0, 0), [5, 1], [-0.1, -0.2], [0, 0], "stop")] * len(scores)
    prompt = Prompt([1], "1", source, "1", {}, "row 0")
    return OpenGroup(prompt, len(scores) - greedy, greedy, dict(enumerate(outputs)), dict(enumerate(scores)))


@pytest.fixture
def group_of(generator):
    """Return a function (flags, scores, outputs) -> the generator's group for them."""

    def make(args, scores: list[Score], outputs: list[Output] = ()) -> Group:
        generator.args = args
        work = work_of(scores, outputs, greedy=len(scores) > args.sampling.rollout_n)
        return Generator._scored(generator, Key(False, 0), work)

    return make


def test_a_response_that_could_not_be_scored_has_no_score(group_of):
    scores = [Score(1.0), Score(None, event="timeout", message="slow")]
    args = parts.make(train_sync.Args, rollout_n=2, overlong_buffer_len=1, max_response_length=2, overlong_penalty_factor=0.5)
    good, bad = group_of(args, scores).responses
    assert (good.score, good.error, bad.score, bad.error) == (0.5, None, None, "timeout: slow")


def test_a_penalty_on_length_is_no_signal(group_of):
    """DAPO's filter looks at correctness: a group of right answers with one long answer would only teach length."""
    args = parts.make(train_sync.Args, rollout_n=2, overlong_buffer_len=4, max_response_length=5, overlong_penalty_factor=0.3)
    outputs = [Output((0, i), [5] * n, [-0.1] * n, [0] * n, "stop") for i, n in enumerate((1, 4))]
    for scores, has_signal in (([1.0, 1.0], False), ([0.1, 0.1], False), ([1.0, 0.0], True), ([0.775, 1.0], True)):
        group = group_of(args, list(map(Score, scores)), outputs)
        short, long = group.responses
        assert short.score == scores[0] and long.score == pytest.approx(scores[1] - 0.225) and group.differs == has_signal
        assert Group.from_bytes(group.to_bytes()).differs == has_signal
        plain = group_of(parts.replace(args, overlong_buffer_len=0), list(map(Score, scores)), outputs)
        assert plain.differs == (scores[0] != scores[1])


def test_without_the_greedy_baseline_no_response_is_trained(group_of):
    scores = [Score(1.0), Score(0.0), Score(None, event="died", message="gone")]
    args = parts.make(train_sync.Args, rollout_n=2, adv_estimator="remax")
    group = group_of(args, scores)
    assert [r.score for r in group.responses] == [None, None]
    assert {r.error for r in group.responses} == {"the greedy response: died: gone"}
    assert group_of(args, [*scores[:2], Score(0.5)]).baseline == 0.5


def test_a_validation_has_the_reward_functions_other_numbers(generator):
    """By verl's names, of each source apart, over the responses that have the number; the accuracy has its own name."""
    outcomes = [Score(1.0, {"acc": 0.0, "length": 3.0}), Score(0.0, {"acc": 1.0, "length": 6.0, "form": 1.0})]
    outcomes.append(Score(None, event="died", message="gone"))
    rows = []
    for index, source in enumerate(("d", "other/e")):
        work = work_of(outcomes, source=source)
        rows += json.loads(json.dumps([generator._row(index, work, number) for number in range(3)]))
    metrics = validation_metrics(rows)
    for source in ("d", "other/e"):
        assert metrics[f"val-aux/{source}/length/mean@3"] == 4.5 and metrics[f"val-aux/{source}/form/mean@3"] == 1
        assert metrics[f"val-core/{source}/acc/mean@3"] == pytest.approx(1 / 3)
        assert metrics[f"val-core/{source}/acc/pass@2"] == pytest.approx(2 / 3)
        assert metrics[f"val-core/{source}/acc/pass@3"] == 1
    assert metrics["val-aux/reward/unscored"] == 2
    assert len(metrics) == 1 + 2 * 5, "these, mean and pass of the accuracy, and the count of unscored"


@pytest.mark.parametrize("scale", [(0.0, 1.0), (-1.0, 1.0), (-5.0, -1.0), (0.1, 0.9)])
def test_a_judge_that_fails_in_a_validation_never_raises_it(scale):
    """Whatever the scale of a reward that tells no accuracy, and whichever responses it fails on, of two to a prompt, if one of
    the worst is scored."""
    low, high = scale
    scores = [low, high, high, low, high, high]
    rows = [{"data_source": "d", "index": i // 2, "acc": score, "error": None} for i, score in enumerate(scores)]
    other = {"data_source": "other", "index": 9, "acc": -100.0, "error": None}  # of a scale of its own
    whole = validation_metrics([*rows, other, other])
    for lost in {*itertools.combinations(range(6), 2)} - {(0, 3)}:
        with_errors = [row | {"acc": 0.0, "error": "died: x"} if i in lost else row for i, row in enumerate(rows)]
        found = validation_metrics([*with_errors, other, other])
        assert found.pop("val-aux/reward/unscored") == len(lost)
        assert all(value <= whole[name] + 1e-9 for name, value in found.items())
        assert found["val-core/d/acc/mean@2"] >= min(low, 0)


def test_a_validation_of_failures_does_not_choose_the_best_checkpoint(tmp_path):
    """Their mean of 0 would be above every real mean of a reward with negative scores."""
    (record := SimpleNamespace(warned=[])).warn = lambda *warning: record.warned.append(warning)
    record.log_generations, record.warn_unscored = lambda *_: None, lambda *_: None
    recorded = {}

    def log_validation(metrics: dict, version: int, at_step: int, chooses_best: bool) -> None:
        recorded[version] = chooses_best
        with open(tmp_path / "validations.jsonl", "a") as file:
            file.write(json.dumps({"step": version, "chooses_best": chooses_best} | metrics) + "\n")

    record.log_validation = log_validation
    saver = SimpleNamespace(best=Best(tmp_path, is_main=True))
    run = SimpleNamespace(record=record, saver=saver, args=train_sync.Args(), _begun=0)
    run._events = ScoringEvents()
    run.health = SimpleNamespace(of_validation=lambda *_: None)
    lost = {2: {0, 1, 2, 3}, 3: {1, 2, 3}, 4: {0, 1, 2}, 5: {0, 1}}  # of the four responses of one of two sources
    for step in range(1, 7):
        (training := tmp_path / f"step_{step:06d}" / "training").mkdir(parents=True)
        (training / "state.json").write_text("")
        scores = (1.0 if step == 6 else 0.5, -1.0, -1.0, -1.0)
        rows = [{"data_source": s, "index": i, "acc": x, "error": None} for s in "de" for i, x in enumerate(scores)]
        for i in lost.get(step, ()):
            rows[i] |= {"acc": None, "error": "died: x"}
        metrics = TrainingRun.record_validation(run, step, rows)
        assert metrics["val-aux/reward/unscored"] == len(lost.get(step, ()))
        best = json.loads((tmp_path / "best" / "best.json").read_text())["step"]
        assert best == (6 if step == 6 else 1), step
    assert recorded == {1: True, 2: False, 3: False, 4: False, 5: True, 6: True}
    assert [count for _, count, _ in record.warned] == [1, 1, 1]
    assert all(f"step {step} " in detail and detail.endswith(" d.") for step, (*_, detail) in enumerate(record.warned, 2))


BROKEN = {  # a function that cannot work, and what the message must say
    "none": ("def score(**_): pass", "returned None, not a finite number"),
    "raises": ("def score(**_): raise ValueError('no such key')", "ValueError: no such key"),
    "exit": ("import os\ndef score(**_): os._exit(3)", "exited with code 3"),
}
SHORT = ["--total-training-steps", 3, "--train-batch-size", 2, "--rollout-n", 2]
SCRIPTS = {
    "train_sync.py": [None, *SHORT],
    "train_one_step_off.py": [2, *SHORT],
    "train_async.py": [2, "--total-training-steps", 3, "--ppo-mini-batch-size", 2, "--rollout-n", 2],
}
CASES = [("train_sync.py", "exit"), ("train_one_step_off.py", "raises"), ("train_async.py", "none")]


@pytest.mark.runs
@pytest.mark.parametrize(("script", "kind"), CASES)
def test_a_reward_that_cannot_work_stops_the_run_at_its_first_step(script, kind, tmp_path):
    code, message = BROKEN[kind]
    (tmp_path / "mine.py").write_text(code)
    processes, *flags = SCRIPTS[script]
    flags += ["--test-freq", 0, "--reward", tmp_path / "mine.py:score"]
    done = run_script(script, "--output-dir", tmp_path / "runs", *flags, ranks=processes, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1 and len(errors) == 1 and message in errors[0], done.stderr[-3000:]
    assert "none of the first step's 4 responses could be scored" in errors[0]
    assert "Traceback" not in done.stderr.split("error:")[0] and not list((tmp_path / "runs").glob("*/step_*"))


CRASHES = """
def score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "{bad}": raise ValueError("a row that it cannot grade")
    return float(len(solution_str) % 2)
"""


@pytest.mark.runs
@pytest.mark.parametrize("script", ["train_sync.py", "train_async.py"])
def test_a_prompt_on_which_the_grader_always_fails_is_no_outage(script, tmp_path):
    """The prompt's groups train nothing, and it does not come again before the next epoch: it would come for ever."""
    rows = [{"prompt": f"{i}+0=", "data_source": "mine", "ground_truth": str(i)} for i in range(5)]
    write(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "mine.py").write_text(CRASHES.format(bad=3))
    processes, *flags = SCRIPTS[script]
    flags += ["--total-training-steps", 10, "--reward", tmp_path / "mine.py:score", "--test-freq", 0, "--reward-workers", 2]
    flags += ["--train-files", tmp_path / "rows.jsonl", "--outage-timeout", 1]
    metrics, run, done = train(script, *flags, out=tmp_path / "runs", ranks=processes)
    assert sum(metrics[step]["reward/unscored"] for step in range(1, 11)) == 2 * 4 and "(--outage-timeout)" not in done.stderr
    groups = [group for row in validations.rows_of(run / "groups.jsonl") for group in row["groups"]]
    assert sorted(group["ticket"] for group in groups) == [*range(20)]
    for group in groups:
        assert (group["scores"] == [None, None]) == (group["ground_truth"] == "3")


OUTAGE = """
import os, pathlib
calls, broken, begun = (pathlib.Path(__file__).with_name(name) for name in ("calls", "broken", "begun"))

def judge(text):
    with calls.open("a") as file:
        file.write("x")
        number = os.fstat(file.fileno()).st_size
    if number >= {at} and not begun.exists(): begun.touch(), broken.touch()
    if broken.exists(): raise ConnectionError("judge: connection refused")
    return float(len(text) % 2)

def score(data_source, solution_str, ground_truth, extra_info):
    return judge(solution_str) if data_source == "judged" else float(len(solution_str) % 2)

class Sums:
    def step(self, message): return [], judge(message["content"]), True
"""


@pytest.mark.runs
@pytest.mark.timeout(400)
@pytest.mark.parametrize("by", ["--reward mine.py:score", "--env mine.py:Sums"])  # the latter is not asked again
@pytest.mark.parametrize(("script", "judged"), [*zip(SCRIPTS, (1, 2, 2), strict=True)])
def test_an_outage_ends_the_run_before_its_step_and_the_prompts_come_again(script, judged, by, tmp_path):
    """Also if other rows can be scored, and whatever other terms a loss has. The same command continues once responses can be
    scored: on policy, it trains the bits of a run without an outage."""
    rows = [{"prompt": f"{i}+{i}=", "data_source": "own" if i % judged else "judged", "ground_truth": "x"} for i in range(40)]
    write(tmp_path / "rows.jsonl", *rows)
    processes, *flags = SCRIPTS[script]
    flags += ["--total-training-steps", 9, "--test-freq", 0, "--train-files", tmp_path / "rows.jsonl", "--outage-timeout", 1]
    flags += ["--staleness-threshold", 0] if script == "train_async.py" else []
    flags += ["--kl-loss-coef", 0.001, "--entropy-coeff", 0.01, "--lr", 1e-3, "--experiment-name", "run", "--save-freq", 2]
    for name, at in (("with", 14), ("without", 10**6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(OUTAGE.format(at=at))
    of = {name: (*flags, *by.replace("mine.py", f"{tmp_path}/{name}/mine.py").split()) for name in ("with", "without")}
    metrics, run, done = train(script, *of["with"], out=tmp_path / "with" / "runs", ranks=processes, check=False)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    last, repeats = max(metrics), "--reward" in by
    checkpoint = run / f"step_{last:06d}"
    assert done.returncode == 1 and 2 <= last < 9 and damage(checkpoint) is None, done.stderr
    assert f"responses of step {last + 1} could not be scored by " in error
    assert not repeats or f"by --reward {tmp_path}/with/mine.py:score: outage: " in error
    assert "ConnectionError: judge: connection refused" in error and f"resume from {checkpoint} with the same command" in error
    (tmp_path / "with" / "broken").unlink()
    metrics, run, done = train(script, *of["with"], out=tmp_path / "with" / "runs", ranks=processes)
    assert f"resumes after step {last} of 9" in done.stdout and max(metrics) == 9
    assert all(metrics[step]["reward/unscored"] == 0 for step in range(1 if repeats else last + 1, 10))
    assert metrics[9].get("reward/events/outage", 0) == 0
    groups = [group["ticket"] for row in validations.rows_of(run / "groups.jsonl") for group in row["groups"]]
    assert sorted(groups) == [*range(18)], "each prompt was trained once"
    if repeats and script != "train_one_step_off.py":  # there newer weights sample the batch again
        _, other, _ = train(script, *of["without"], out=tmp_path / "without" / "runs", ranks=processes)
        assert bits_of(run / "step_000009") == bits_of(other / "step_000009")
