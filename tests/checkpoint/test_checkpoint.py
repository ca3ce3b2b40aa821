"""Runs that are stopped, killed or damaged resume as if nothing had happened."""

import json
import os
import random
import shutil
from pathlib import Path

import kills
import numpy as np
import pytest
from checkpoints import damage, rows
from helpers import ROOT, bits, command, run_script
from safetensors.torch import load_file, save_file

from rl.checkpoint import files, resume
from rl.errors import UserError

FLAGS = ["--total-training-steps", "20", "--test-freq", "6", "--val-max-samples", "40", "--save-freq", "10"]


def go(script: str, out: Path, *flags, ranks: int | None = 1, check: bool = True, **options):
    return run_script(script, *flags, "--output-dir", out, "--experiment-name", "run", ranks=ranks, check=check, **options)


def take_back(run: Path, target: Path, step: int = 10) -> Path:
    """Copy the run as a kill after this step's checkpoint would have left it. Return the copy's directory."""
    shutil.copytree(run, target / "run")
    for later in target.glob("run/step_*"):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    return target / "run"


@pytest.fixture(scope="module")
def sync(demo_model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sync")
    go("train_sync.py", out, *FLAGS, ranks=None)
    return out / "run"


@pytest.mark.runs
@pytest.mark.parametrize("script", ["train_sync.py", "train_one_step_off.py"])
def test_2_ranks_resume_bit_for_bit_and_sync_on_1_rank_too(script, demo_model, tmp_path):
    whole = tmp_path / "whole" / "run"
    go(script, whole.parent, *FLAGS, ranks=2)
    run = take_back(whole, tmp_path / "resumed")
    go(script, run.parent, *FLAGS, ranks=2)
    both = rows(run), rows(whole)
    # in one step off, the step at whose end a validation has come depends on the clock
    for row in (*both[0], *both[1]) if script == "train_one_step_off.py" else ():
        for name in [name for name in row if name.startswith(("val-", "training/validated"))]:
            del row[name]
    assert both[0] == both[1] and len(both[0]) >= 20 and bits(run, 20) == bits(whole, 20)
    assert (run / "tickets.jsonl").read_text() == (whole / "tickets.jsonl").read_text()
    if script == "train_one_step_off.py":
        return
    run = take_back(whole, tmp_path / "fewer")
    go(script, run.parent, *FLAGS, "--total-training-steps", "11", ranks=1)
    both = [next(row for row in rows(r) if row["step"] == 11) for r in (run, whole)]
    assert both[0]["critic/score/mean"] == both[1]["critic/score/mean"]  # the same weights gave the same responses
    assert both[0]["actor/grad_norm"] == pytest.approx(both[1]["actor/grad_norm"], rel=1e-4)


STREAM = ["--total-training-steps", "12", "--test-freq", "0", "--max-ckpt-to-keep", "0", "--staleness-threshold", "12"]
STREAM += ["--max-num-seqs", "128", "--max-response-length", "32"]  # 16 prompts at once: two steps' worth


@pytest.fixture(scope="module")
def stream(demo_model, tmp_path_factory) -> Path:
    """A run of train_async.py with more unfinished groups than the next step trains, and no bound that holds the generator."""
    out = tmp_path_factory.mktemp("stream")
    go("train_async.py", out, *STREAM, "--save-freq", "2", ranks=2)
    return out / "run"


def pieces(path: Path) -> dict[int, list]:
    """Responses by ticket that waited or were unfinished at a checkpoint."""
    names = (files.GROUPS, files.UNFINISHED)
    groups = [group for name in names for group in resume.groups_of((path / "training" / name).read_bytes())]
    return {group.ticket: group.responses for group in groups}


def under_way(tickets: dict[int, list]) -> bool:
    return any(r.finish_reason == "unfinished" and len(r.token_ids) for responses in tickets.values() for r in responses)


@pytest.mark.runs
def test_unfinished_responses_continue_in_a_real_run(stream, tmp_path):
    """Also with one generator more than before."""
    stopped = next((step for step in (2, 4, 6, 8) if under_way(pieces(stream / f"step_{step:06d}"))), None)
    assert stopped, "nothing was under way at any checkpoint: the test would show nothing"
    run = take_back(stream, tmp_path, stopped)
    before = pieces(run / f"step_{stopped:06d}")
    done = go("train_async.py", tmp_path, *STREAM, "--save-freq", "1", "--generators", "2", ranks=3)
    assert f"resumes after step {stopped} of 12" in done.stdout and " 0 dropped" in done.stdout
    seen = 0
    for step in range(stopped + 1, 12):
        for ticket, responses in pieces(run / f"step_{step:06d}").items():
            for old, new in zip(before.get(ticket, ()), responses, strict=False):
                n = len(old.token_ids)
                assert np.array_equal(new.token_ids[:n], old.token_ids)
                assert np.array_equal(new.log_probs[:n], old.log_probs) and np.array_equal(new.versions[:n], old.versions)
                seen += bool(n) and old.finish_reason == "unfinished"
    assert seen, "no response that was under way was seen again"
    lines = (run / "tickets.jsonl").read_text().splitlines()
    assert sorted(ticket for line in lines for ticket in json.loads(line)["trained"]) == [*range(12 * 8)]


@pytest.mark.runs
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("script", "number"), [("train_async.py", 4), ("train_one_step_off.py", 1)])
def test_kills_lose_nothing(script, number, demo_model, monkeypatch):
    """tests/tools/kills.py, run by hand, kills more runs, each started as a user starts it."""
    seed = random.randrange(10**6)
    print(f"--seed {seed}")
    monkeypatch.setenv("SPARE_RANKS", str(2 * number))
    run = kills.main(kills.Args(script, kills=number, steps_between=4, seed=seed), command(ranks=2))
    shutil.rmtree(run.parent)


# ------------------------------------------------------------------------------------------------------ damage


def find(out: Path, **flags) -> Path:
    return resume.find(resume.CheckpointArgs(**flags), str(out), "run").checkpoint


@pytest.mark.runs
def test_what_cannot_be_read_is_named(sync, tmp_path, ranks):
    shutil.copytree(sync, tmp_path / "run", symlinks=True)
    path = tmp_path / "run" / "step_000020"
    assert find(tmp_path) == path and damage(path) is None
    (shard,) = path.glob("training/shard-*")
    for file, read in ((shard, lambda path: resume.load_tensors(path, {})), (path / "training" / "state.json", resume.load)):
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(UserError, match=f"{path}.* cannot be read .*Take another checkpoint with --resume-mode PATH"):
            read(*[path, None][: 1 + (read is resume.load)])
    (path / "training" / "state.json").write_text('{"step": 20, "learner": {}}')
    with pytest.raises(UserError, match=f"{path} was written by an older version.*--model {path}, with another --experiment-"):
        resume.load(path, None)
    (path / "training" / "state.json").unlink()
    assert find(tmp_path) == tmp_path / "run" / "step_000010"
    shutil.rmtree(tmp_path / "run" / "step_000010" / "training")
    with pytest.raises(UserError, match=r"run: no checkpoint has its training/state\.json\. Start a new run"):
        find(tmp_path)


@pytest.mark.parametrize("name", ["step_000020.superseded", "step_20", "step_0000020", "mine"])
def test_a_checkpoint_under_another_name_is_refused_with_what_to_do(tmp_path, name):
    """The name of a checkpoint contains its step."""
    for path in (tmp_path / name, tmp_path / "step_000020"):
        (path / "training").mkdir(parents=True)
        (path / "training" / "state.json").write_text("{}")
    assert resume.check_path(tmp_path / "step_000020").step == 20
    with pytest.raises(UserError, match=f"{tmp_path / name}: a checkpoint's name is step_ and six digits"):
        resume.check_path(tmp_path / name)


def refused(out: Path, *flags) -> str:
    """Return the error of a resume that the run in `out` refuses."""
    done = go("train_sync.py", out, *FLAGS, *flags, ranks=None, check=False)
    assert done.returncode == 1 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.runs
def test_another_run_is_not_gone_on_with(sync, models, demo_model, tmp_path):
    run = take_back(sync, tmp_path)
    message = refused(tmp_path, "--lr", "0.1", "--rollout-n", "4", "--train-max-samples", "77")
    for line in (
        "--lr: was 0.0001, is 0.1",
        "--rollout-n: was 8, is 4",
        "--train-max-samples: was -1, is 77",
        f"--resume-mode {run}/step_000010:",
    ):
        assert line in message
    named = ["--resume-mode", run / "step_000010"]
    assert "was written with --seed 0, now it is 1" in refused(tmp_path, "--seed", "1", *named)
    message = refused(tmp_path, "--total-training-steps", "2")
    assert "trained 10 steps already, more than the 2 asked for" in message
    message = refused(tmp_path / "none", "--resume-mode", tmp_path / "nowhere")
    assert "nowhere: no checkpoint is there" in message
    fewer = tmp_path / "fewer"
    shutil.copytree(demo_model, fewer)
    config = json.loads((fewer / "config.json").read_text())
    layers, config["num_hidden_layers"] = config["num_hidden_layers"], config["num_hidden_layers"] - 1
    config.pop("layer_types", None)
    (fewer / "config.json").write_text(json.dumps(config))
    tensors = load_file(fewer / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f".layers.{layers - 1}." not in name}
    save_file(kept, fewer / "model.safetensors", {"format": "pt"})
    assert "the content of --model: was demo (" in refused(tmp_path, "--model", fewer)
    message = refused(tmp_path, "--model", fewer, *named)
    assert "does not fit: " in message and "Give the flags of its run (--model, " in message
    assert f"layers.{layers - 1}." in message and "no such tensor" in message
    assert rows(run) == rows(sync), "a run that is refused is left as it was"


@pytest.mark.runs
def test_a_named_checkpoint_resumes_with_other_settings_and_prints_them(sync, tmp_path):
    run = take_back(sync, tmp_path)
    (run / "config.json").unlink()
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'5\n{"a": 1}\n\xff\xfe\n{"step": 11, "cu')
    flags = ["--total-training-steps", "11", "--test-freq", "0", "--lr", "0.01", "--resume-mode", run / "step_000010"]
    done = go("train_sync.py", tmp_path, *flags, ranks=None)
    assert f"{run}/step_000010 resumes with other settings:\n" in done.stderr
    assert "\n  --lr: was 0.0001, is 0.01\n" in done.stderr
    assert "resumes after step 10 of 11" in done.stdout
    assert [row["step"] for row in rows(run)] == [*range(12)] and rows(run)[-1]["actor/lr"] == 0.01


@pytest.mark.runs
def test_the_best_checkpoint_stays(sync):
    best = json.loads((sync / "best" / "best.json").read_text())
    scores = {
        row["training/validated_step"]: row["val-core/demo/acc/mean@1"]
        for row in rows(sync)
        if "val-core/demo/acc/mean@1" in row
    }
    assert best == {"step": 20, "score": scores[20]}, "of the saved steps 10 and 20, only 20 was validated"
    assert bits(sync, 20) == {n: t.numpy().tobytes() for n, t in load_file(sync / "best" / "model.safetensors").items()}


@pytest.mark.runs
def test_a_full_disk_stops_no_training_and_leaves_no_half_checkpoint(demo_model, tmp_path):
    """A limit on the size of files makes writing fail as a full disk does."""
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
    flags = ["--total-training-steps", 3, "--save-freq", 1, "--test-freq", 0]
    done = go("tests/programs/patched.py", tmp_path, full, "train_sync.py", *flags, ranks=None, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    for step in (1, 2, 3):
        assert f"warning: the checkpoint of step {step} could not be written: " in done.stderr
    assert "error: --output-dir" in done.stderr and "the last checkpoint, of step 3, could not be written" in done.stderr
    assert len(rows(tmp_path / "run")) == 3 and not [*tmp_path.glob("run/step_*"), *tmp_path.glob("run/.step_*")]


def test_nothing_unpickles():
    """All data from disk and network is JSON, raw arrays or safetensors."""
    sources = [*ROOT.glob("rl/**/*.py"), *ROOT.glob("*.py")]
    for word in ("pickle.load", "torch.load(", "_object_list(", "gather_object(", "allow_pickle=True", "yaml.load("):
        assert not [path.name for path in sources if word in path.read_text()], word


DIES_ONCE = """
import os, signal
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    log = Path(__file__).with_name("calls")
    with open(log, "ab") as file:
        file.write(b".")
    died = Path(__file__).with_name("died")
    if log.stat().st_size > 14 and not died.exists():  # in the fourth step of four responses
        died.touch()
        guard = Path(f"/proc/{os.getppid()}/stat").read_text()  # stands between the rank and this process
        os.kill(int(guard.rpartition(")")[2].split()[1]), signal.SIGKILL)
    return float(len(solution_str))
"""


@pytest.mark.runs
def test_a_restarted_job_finds_its_own_run_whatever_its_name(tmp_path, name="a/b/c"):
    """With --resume-mode disable too: a job is one run, however often torchrun starts its ranks."""
    (tmp_path / "reward.py").write_text(DIES_ONCE)
    flags = ["--total-training-steps", 5, "--save-freq", 1, "--test-freq", 0, "--train-batch-size", 2, "--rollout-n", 2]
    flags += ["--experiment-name", name, "--resume-mode", "disable", "--reward", f"{tmp_path / 'reward.py'}:score"]
    (tmp_path / "runs" / name).mkdir(parents=True)  # of an earlier run: this one is name-2
    (tmp_path / "runs" / name / "config.json").write_text("{}")
    line = ["--max-restarts", 1, "--monitor-interval", 0.1, "train_sync.py", *flags, "--output-dir", tmp_path / "runs"]
    run_script(*line, ranks=1, env={"SPARE_RANKS": "1"})
    run = tmp_path / "runs" / f"{name}-2"
    assert (tmp_path / "died").exists() and not (tmp_path / "runs" / f"{name}-3").exists()
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5] and len([*run.glob("config_from_*.json")]) == 1


def test_a_restarted_job_finds_the_run_that_it_resumed(tmp_path, monkeypatch):
    """--resume-mode PATH leads out of --output-dir: after a restart the run's newest checkpoint counts, not that path again."""
    run = tmp_path / "elsewhere" / "x"
    for step in (2, 4):
        (run / f"step_{step:06d}" / "training").mkdir(parents=True)
        (run / f"step_{step:06d}" / "training" / "state.json").write_text("{}")
    (run / "config_from_000003.json").write_text(json.dumps({"job": "mine"}))
    monkeypatch.setattr(resume.launch, "restarts", lambda: 1)
    monkeypatch.setattr(resume.launch, "job", lambda: "mine")
    args = resume.CheckpointArgs(resume_mode=str(run / "step_000002"))
    assert resume._find(args, tmp_path / "runs", None).checkpoint == run / "step_000004"
