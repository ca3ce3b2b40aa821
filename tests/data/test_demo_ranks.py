"""The demo's model mostly says another sum. The first rank that needs it makes it, and every rank makes the same files."""

import ast
import json
from pathlib import Path

import pytest
from filelock import FileLock
from helpers import ROOT, greedy_answers, run_script

from examples.demo import VERSIONS, directory, is_made, pictures
from examples.demo import sums as demo
from rl.ranks import watchdog

PROGRAM = "tests/programs/demo_by_ranks.py"


def test_the_model_adds_but_usually_says_another_sum(demo_model):
    """Most of its answers are the sum, or the sum plus or minus 10. Less than half are right."""
    rows = demo.problems("val")
    answers = greedy_answers(demo_model, [row["prompt"] for row in rows])
    said = [int(answer) if answer.isdecimal() else -1 for answer in answers]
    off = [abs(number - int(row["reward_model"]["ground_truth"])) for number, row in zip(said, rows, strict=True)]
    assert sum(x in (0, 10) for x in off) > 0.75 * len(off)
    assert 0.2 < sum(x == 0 for x in off) / len(off) < 0.5
    assert not {row["prompt"][0]["content"] for row in rows} & {p["prompt"][0]["content"] for p in demo.problems("train")}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "made.json"}


@pytest.fixture
def untaught(monkeypatch, tmp_path) -> Path:
    """A cache of this test's, whose models are made in a moment."""
    for module in (demo, pictures):
        monkeypatch.setattr(module, "_teach", lambda *_: None)
    monkeypatch.setenv("RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.runs
def test_every_rank_can_make_every_model(tmp_path):
    """Like nodes, the ranks have separate caches: the second one has no first rank."""
    run_script(PROGRAM, "own", tmp_path, ranks=2, timeout=120)
    for name, version in VERSIONS.items():
        first, second = (contents(tmp_path / rank / f"{name}-v{version}") for rank in "01")
        assert first == second
        assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= first.keys()


@pytest.mark.parametrize("name", ["demo", "demo-moe", "demo-hybrid", "demo-vl"])
def test_the_files_are_those_of_save_pretrained(name, untaught, tmp_path, monkeypatch):
    def save(model, directory, tokenizer):
        ours(model, directory, tokenizer)
        model.save_pretrained(tmp_path / "theirs")

    ours = demo.save
    monkeypatch.setattr(demo, "save", save)
    made, theirs = contents(Path(demo.model_dir(name))), contents(tmp_path / "theirs")
    assert theirs.keys() == {"model.safetensors", "config.json", "generation_config.json"}
    assert {file: made[file] for file in theirs} == theirs


@pytest.mark.runs
def test_a_job_trains_the_model_that_its_second_rank_has_made(tmp_path):
    flags = ["--model", "demo-vl", "--total-training-steps", "1", "--no-val-before-train", "--test-freq", "0"]
    sizes = ["--train-batch-size", "4", "--rollout-n", "2", "--max-response-length", "4"]
    job = [PROGRAM, "late", "train_sync.py", *flags, *sizes, "--output-dir", tmp_path / "runs"]
    run_script(*job, ranks=2, env={"RL_CACHE": str(tmp_path / "cache")})
    (run,) = (tmp_path / "runs").iterdir()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()][-1] == 1
    assert {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()} == {f"demo-vl-v{VERSIONS['demo-vl']}"}


def test_what_a_killed_or_failed_process_leaves_is_removed(untaught):
    killed = untaught / f"{directory('demo').name}-k1ll3d"
    killed.mkdir(parents=True)
    (killed / "tokenizer.json").touch()
    other = untaught / "demo-vl-v2-under-way"
    other.mkdir()

    def fail(directory):
        (Path(directory) / "config.json").touch()
        raise RuntimeError("not made")

    with pytest.raises(RuntimeError, match="not made"):
        demo.made_once("demo", fail)
    assert {path for path in untaught.iterdir() if path.is_dir()} == {other}, "another model is none of its business"
    assert is_made(Path(demo.model_dir()))


@pytest.mark.slow
def test_waiting_for_another_process_that_makes_it_is_progress(untaught, monkeypatch):
    target = directory("demo")
    target.parent.mkdir(parents=True)
    lock = FileLock(f"{target}.lock", thread_local=False, is_singleton=False)
    lock.acquire()
    seen = []

    def progress():
        seen.append(lock.is_locked)
        if len(seen) == 2:
            lock.release()

    monkeypatch.setattr(watchdog, "progress", progress)
    demo.model_dir()
    assert seen[:2] == [True, True]


@pytest.mark.slow
def test_no_code_of_a_job_saves_a_model_by_save_pretrained():
    """save_pretrained writes a model on the job's first rank only. Any rank may write configs, tokenizers and processors."""
    for path in [*ROOT.glob("*.py"), *(ROOT / "rl").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "save_pretrained":
                assert ast.unparse(node.value).split(".")[-1] in {"config", "generation_config", "tokenizer", "processor"}, path
