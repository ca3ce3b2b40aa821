"""Whole runs of each feature on the demo's models: async training without staleness is sync training, a run that resumes is one
that was never stopped, recorded samples replay to the same bits, and two learners learn what one does."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import bits, run_script, undocumented, weights

from examples.demo.sums import problems

pytestmark = pytest.mark.runs
STEPS, SAVED = 4, 2
RUN = ("--total-training-steps", STEPS, "--save-freq", SAVED, "--max-ckpt-to-keep", 0, "--rollout-n", 4, "--test-freq", 0)
RUN = (*RUN, "--lr", 1e-3, "--lr-warmup-steps", 0)


@dataclass
class Row:
    """A feature: its flags, the metrics that it must report, and another value of its flags, which a resumed run refuses with
    this message."""

    flags: str = ""
    metrics: str = ""
    other: str = ""
    refused: str = ""
    learners: str = ""  # flags of the two learners
    ranks: int = 1  # of the sync run, and of each side in async


IMAGES = "--model demo-vl --train-files demo-vl --val-files demo-vl"
FROZEN = f"{IMAGES} --freeze-vision-tower --param-offload"
TOOL = "--model demo-calculator --env demo-calculator --max-response-length 24"
CRITIC = "--adv-estimator gae --critic-warmup 3 --critic-lr 1e-3 --lam 0.95 --kl-loss-coef 0.001 --kl-reward-coef 0.001"
CRITIC += " --entropy-coeff 0.01 --rollout-is token --rollout-rs seq_mean_k1 --rollout-rs-threshold 0.9_1.1"
OF_CRITIC = "critic/vf_loss critic/vf_explained_var timing_s/values timing_s/update_critic"
OF_CRITIC += " actor/kl_loss actor/reward_kl_penalty rollout_corr/rollout_rs_masked_fraction"
SELF = "--teacher self --teacher-prompt {ground_truth}={prompt} --max-tokens-per-micro-batch 100 --teacher-top-k 3"
EXPERTS = "--model demo-moe --router-replay R3 --rollout-dtype bfloat16 --max-tokens-per-micro-batch 80"
PROMPTS = "--teacher-prompt: was {ground_truth}={prompt}, is {prompt}"
HALVES = "--sequence-parallel 2"
ROWS = {
    "plain, a row for two": Row("", "", "--rollout-n 2", "--rollout-n: was 4, is 2", HALVES),
    "two of each": Row(ranks=2),
    "adapters, a sampling mask": Row(
        "--lora-rank 4 --top-k 5 --min-p 0.05 --keep-sampling-mask", "", "--lora-rank 8", "was written with --lora-rank 4"
    ),
    "a critic, KL, correction": Row(CRITIC, OF_CRITIC, "--adv-estimator grpo", "--adv-estimator: was gae"),
    "a teacher": Row(
        "--teacher TEACHER --teacher-coef 0.5 --teacher-top-k 3",
        "actor/teacher_kl actor/teacher_top_kl timing_s/teacher",
        "--teacher DEMO",
        "--teacher: was",
    ),
    "its own teacher": Row(SELF, "actor/teacher_kl actor/teacher_top_kl", "--teacher-prompt {prompt}", PROMPTS, HALVES),
    "experts": Row(EXPERTS, "moe/replay/tokens_differ moe/load/max", learners="--expert-parallel 2"),
    "a delta net": Row("--model demo-hybrid"),
    "images": Row(IMAGES),
    "images of an environment, a frozen tower": Row(
        f"{FROZEN} --max-response-length 40 --env tests/programs/shows.py:Shows --max-tokens-per-micro-batch 150",
        "reward/extra/turns/mean",
        learners=HALVES,
    ),
    "files with weights, a map": Row(
        "--train-files A:1 B:2 --map MAP", "", "--train-files A:1 B:3", "the content of --train-files"
    ),
    "a tool": Row(f"{TOOL} --entropy-coeff 0.1", "response_length/trained/mean reward/extra/tool_calls/mean"),
    "a tool, stop strings": Row(  # which end a call in place of its end token
        f"{TOOL} --stop </tool_call> 77", "reward/extra/tool_calls/mean", "--stop </tool_call>", "--stop: was"
    ),
}


@dataclass
class Runs:
    """The runs of a row. The one in sync, which the others are compared with, is recorded."""

    out: Path
    flags: tuple

    def start(self, script: str, name: str, *more, **how):
        return run_script(script, *self.flags, "--output-dir", self.out, "--experiment-name", name, *more, **how)

    def metrics(self, name: str) -> list[dict]:
        rows = map(json.loads, (self.out / name / "metrics.jsonl").read_text().splitlines())
        return [row for row in rows if row["step"]]


@pytest.fixture(scope="module")
def teacher(demo_model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("teacher")
    run_script("train_sync.py", *RUN, "--output-dir", out, "--experiment-name", "run")
    return out / "run" / f"step_{STEPS:06d}"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Two files of the demo's problems, with weights, and a function that reads them."""
    where, rows = tmp_path_factory.mktemp("files"), problems("train")[:12]
    for name, its in (("a.jsonl", rows[:9]), ("b.jsonl", rows[9:])):
        (where / name).write_text("".join(json.dumps({"wrapped": row}) + "\n" for row in its))
    (where / "map.py").write_text("def f(row):\n    return row['wrapped']\n")
    named = {"A:1": "a.jsonl:1", "B:2": "b.jsonl:2", "B:3": "b.jsonl:3", "MAP": "map.py:f"}
    return {word: f"{where}/{name}" for word, name in named.items()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ROWS)
def test_round_trips(name, teacher, files, demo_model, tmp_path):
    row, paths = ROWS[name], {"TEACHER": teacher, "DEMO": demo_model, **files}
    flags, other = ([paths.get(word, word) for word in words.split()] for words in (row.flags, row.other))
    runs = Runs(tmp_path, (*RUN, *flags))

    ranks = {"ranks": row.ranks} if row.ranks > 1 else {}
    runs.start("train_sync.py", "sync", **ranks)
    sync, trained = bits(tmp_path / "sync", STEPS), weights(tmp_path / "sync", STEPS)
    still = {key for key, held in bits(tmp_path / "sync", SAVED).items() if held == sync[key]}
    assert still < sync.keys(), "the steps after the checkpoint move the weights"
    assert "--freeze-vision-tower" not in flags or still == {key for key in sync if key.startswith("model.visual.")}
    metrics = runs.metrics("sync")[-1]
    assert {*row.metrics.split()} <= metrics.keys() and not undocumented({STEPS: metrics})

    runs.start("train_async.py", "async", "--staleness-threshold", 0, "--generators", row.ranks, ranks=2 * row.ranks)
    assert bits(tmp_path / "async", STEPS) == sync

    if row.ranks == 1:
        again = run_script("replay.py", tmp_path / "sync", "--output-dir", tmp_path, "--experiment-name", "again")
        assert "the weights are bit for bit those of" in again.stdout
        learners = ("--output-dir", tmp_path, "--experiment-name", "two", *row.learners.split())
        run_script("replay.py", tmp_path / "sync", *learners, ranks=2)
        two = weights(tmp_path / "two", STEPS)
        for key, tensor in trained.items():
            # AdamW makes a whole step of a gradient that is rounding alone: one in a thousand may be off by more than a tenth
            off = (two[key] - tensor).abs()
            assert (off > 1e-4).sum() <= off.numel() / 1000 and off.max() < 2e-3, key

    shutil.rmtree(tmp_path / "sync" / f"step_{STEPS:06d}")
    if other:
        refused = runs.start("train_sync.py", "sync", *other, check=False)
        assert refused.returncode == 1 and row.refused in refused.stderr
    done = runs.start("train_sync.py", "sync", **ranks)
    assert f"resumes after step {SAVED} of {STEPS}" in done.stdout
    assert bits(tmp_path / "sync", STEPS) == sync
