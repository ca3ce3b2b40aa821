"""A replay trains on recorded samples: with the same flags it gives the same bits, and it keeps its other promises."""

import json
import re
import shutil
import sys
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from helpers import ROOT, is_documented, run_script

import replay
from rl.errors import UserError
from tools.recorded import Record
from tools.view import learner

STEPS = 6
FLAGS = ["--total-training-steps", STEPS, "--test-freq", 0, "--save-freq", 1, "--max-ckpt-to-keep", 0]
SMALL = ["--train-batch-size", 4, "--rollout-n", 4]
STREAM = ["--ppo-mini-batch-size", 4, "--rollout-n", 4]
# two mini-batches, two epochs, a KL, several micro-batches: whatever a step carries to the next
EVERYTHING = ["--ppo-mini-batch-size", 2, "--ppo-epochs", 2, "--kl-reward-coef", 0.001]
EVERYTHING += ["--max-tokens-per-micro-batch", 120, "--entropy-coeff", 0.01]


def record(script, out: Path, *flags, **how) -> Path:
    """Trains and records; returns the run's directory."""
    where = ["--output-dir", out, "--experiment-name", "run", "--record-samples", "all"]
    run_script(script, *where, *FLAGS, *flags, **how)
    return out / "run"


def replayed(where: Path, out: Path, *flags, **how) -> tuple[Path, str]:
    """Replays; returns the replay's directory and what it printed."""
    done = run_script("replay.py", where, "--output-dir", out, "--experiment-name", "again", *flags, **how)
    return out / "again", done.stdout + done.stderr


def rows(run: Path) -> dict[int, dict]:
    return {row["step"]: row for row in checkpoints.rows(run)}


def same(run: Path, again: Path, first: int = 1, last: int = STEPS) -> None:
    """Check weights and moments after the last step, and every learner metric of the replayed steps."""
    ours, theirs = (checkpoints.bits_of(of / f"step_{last:06d}" / "training") for of in (run, again))
    assert ours == theirs != {}
    ours, theirs = rows(run), rows(again)
    assert sorted(theirs) == list(range(first, last + 1))
    for step, row in theirs.items():
        assert {name: x for name, x in row.items() if name in ours[step]} == {n: ours[step][n] for n in row if n in ours[step]}
        assert {"actor/loss", "actor/grad_norm", "critic/advantages/mean"} <= row.keys() & ours[step].keys()


@pytest.fixture(scope="module")
def sync(demo_model, tmp_path_factory) -> Path:
    return record("train_sync.py", tmp_path_factory.mktemp("sync"), *SMALL, *EVERYTHING)


@pytest.mark.runs
def test_the_same_flags_give_the_same_bits(sync, tmp_path):
    again, said = replayed(sync, tmp_path)
    same(sync, again)
    assert f"the weights are bit for bit those of {sync}/step_000006" in said
    assert all(text.startswith("steps without any signal") for text in re.findall("warning: (.*)", said))
    assert all(is_documented(name) for name in rows(again)[6] if name != "step")


@pytest.mark.runs
def test_what_the_learner_computes_of_each_token(sync, tmp_path):
    """Of the wanted steps, by one learner and by two; its sums are the step's metrics. The first ratio is 1."""
    found = {}
    for learners in (1, 2):
        again, _ = replayed(sync, tmp_path / str(learners), *["--from-step", 4, "--to-step", 5, "--tokens"], ranks=learners)
        found[learners] = {step: learner.read(sync / "samples", step) for step in (4, 5)}
        assert sorted(rows(again)) == [4, 5] and not learner.read(sync / "samples", 6)
    for step, row in rows(sync).items():
        if step not in (4, 5):
            continue
        responses = {(g.ticket, i): r for g in Record(sync).groups(step) for i, r in enumerate(g.responses)}
        one, two = found[1][step], found[2][step]
        assert one.keys() == two.keys() == responses.keys()
        for place, response in responses.items():
            assert {len(column) for column in one[place].values()} == {len(response.token_ids)}
            assert one[place]["gap"] == pytest.approx(one[place]["log_prob"] - response.log_probs, abs=1e-6)
            for name in ("log_prob", "advantage", "entropy", "ratio"):
                assert two[place][name] == pytest.approx(one[place][name], abs=2e-3)
        whole = {name: np.concatenate([columns[name] for columns in one.values()]) for name in one[next(iter(one))]}
        assert whole["advantage"].mean() == pytest.approx(row["critic/advantages/mean"], abs=1e-5)
        assert whole["advantage"].max() == pytest.approx(row["critic/advantages/max"])
        rewards = [columns["reward"].sum() for columns in one.values()]
        assert np.mean(rewards) == pytest.approx(row["critic/rewards/mean"], abs=1e-5)
        assert (whole["ratio"] != 1).any() and {0.0, 1.0} >= {*whole["clipped"]}
    replayed(sync, tmp_path / "3", "--from-step", 4, "--to-step", 4, "--tokens", "--ppo-epochs", 1)
    columns = learner.read(sync / "samples", 4).values()
    unchanged = sum(its["ratio"] == pytest.approx(1.0, abs=1e-5) for its in columns)
    assert unchanged == len(columns) // 2, "the first of two mini-batches"


@pytest.mark.slow
def test_a_replay_of_a_run_that_was_killed_and_resumed(demo_model, tmp_path):
    """The samples that were trained again count, and a replay may begin before or after the kill."""
    run = record("train_async.py", tmp_path, *STREAM, ranks=2)
    for step in (4, 5, 6):
        shutil.rmtree(run / f"step_{step:06d}")
    record("train_async.py", tmp_path, *STREAM, ranks=2)
    assert Record(run).start_of(4)["after"] == 3
    for first in (1, 5):
        again, said = replayed(run, tmp_path / str(first), "--from-step", first)
        same(run, again, first)
        assert f"replays steps {first} to 6" in said and "bit for bit" in said


@pytest.mark.runs
def test_other_flags_are_said_to_be_off_policy(sync, tmp_path):
    """The replay starts at a checkpoint. The report shows it next to the run and says how they differ."""
    again, said = replayed(sync, tmp_path, "--from-step", 4, "--loss-mode", "gspo", "--lr", "3e-4")
    ours, theirs = rows(sync), rows(again)
    assert sorted(theirs) == [4, 5, 6] and theirs[4]["critic/score/mean"] == ours[4]["critic/score/mean"]
    assert theirs[4]["actor/loss"] != ours[4]["actor/loss"] and theirs[4]["actor/lr"] == pytest.approx(3 * ours[4]["actor/lr"])
    assert "off-policy: the weights that sampled differ" in said and "--loss-mode gspo (was ppo_clip)" in said
    assert "bit for bit" not in said
    done = run_script("report.py", sync, again, "--output", tmp_path / "report")
    page = (tmp_path / "report" / "report.md").read_text()
    assert "2 runs in 2 groups" in done.stdout and "a replay, off-policy" in page
    assert re.search(r"replay of train_sync --loss-mode gspo --lr 0.0003.*, off-policy", page), page[:600]


@pytest.mark.slow
def test_code_that_has_changed_since(demo_model, tmp_path):
    """A replay takes the script and the losses.py that the run recorded, even if both have changed. --script takes another
    script on the same samples."""
    fork, formulas = tmp_path / "my_experiment.py", tmp_path / "losses.py"
    fork.write_text((ROOT / "train_sync.py").read_text().replace("    loss = terms[", "    loss = 3 * terms["))
    mask = "    loss = torch.where(mask, loss, 0.0)\n"
    formulas.write_text((ROOT / "losses.py").read_text().replace(mask, f"{mask}    loss = loss * 2\n"))
    run = record(fork, tmp_path, *SMALL, "--grad-clip", 1e9, imported="packages")
    fork.write_text("raise ImportError('gone')")
    formulas.write_text("raise ImportError('gone')")
    same(run, replayed(run, tmp_path, imported="packages")[0])
    assert rows(run)[1]["actor/loss"] == pytest.approx(3 * rows(run)[1]["actor/pg_loss"], rel=1e-5) != 0
    again, _ = replayed(run, tmp_path / "plain", "--script", "train_sync.py", imported="packages")
    assert rows(again)[1]["actor/loss"] == pytest.approx(rows(run)[1]["actor/pg_loss"] / 2, rel=1e-5)


@pytest.mark.slow
def test_a_step_that_was_skipped_is_skipped_again(demo_model, tmp_path):
    """The loss is infinite on one response of step 5, the first to the 18th ticket."""
    fork = tmp_path / "my_experiment.py"
    text = (ROOT / "train_sync.py").read_text()
    line = '    stats["ppo_kl"] = old - log_prob.detach()\n'
    call, bad = "terms, stats = actor_loss(", "    tickets = t.tickets\n"
    bad += "    first = (t.group == tickets.index(18)).nonzero()[0] if 18 in tickets else -1\n"
    bad += "    bad = (t.seq == first).float()\n"
    text = text.replace(call, f"t.tickets, t.group = batch.tickets, batch.group; {call}")
    fork.write_text(text.replace(line, f"{line}{bad}    token_loss = token_loss / (1 - bad)\n"))
    flags = [*SMALL, "--max-prompt-length", 16, "--max-tokens-per-micro-batch", 60]
    run = record(fork, tmp_path, *flags, env={"PYTHONPATH": str(ROOT)})
    assert [rows(run)[step]["actor/skipped_steps"] for step in (4, 5, 6)] == [0, 1, 1]
    same(run, replayed(run, tmp_path, "--from-step", 5)[0], first=5)


REFUSED = {
    "": "the first argument is the directory of a run",
    "nowhere": "nowhere is no run that recorded its samples",
    "RUN --rollout-n 3 --seed 4": "--seed, --rollout-n: a replay cannot change how the samples were made",
    "RUN --over-sample 1": "--over-sample: a replay cannot change how the samples were made",
    "RUN --train-batch-size 2": "--train-batch-size: a replay cannot change how the samples were made",
    "RUN --from-step 99": "step 99 is not in .*, which holds steps 1 to 6",
    "RUN --script nowhere.py": "--script nowhere.py: there is no such Python file",
    "RUN --lr 7": "--lr must be above 0",
    "RUN --from-step x": "argument --from-step: invalid int value: 'x'",
}


@pytest.mark.runs
@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_replayed_is_one_message(sync, words, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "train_sync", None)  # and back
    with pytest.raises(UserError, match=REFUSED[words]):
        replay.read([str(sync) if word == "RUN" else word for word in words.split()])


@pytest.mark.parametrize(("saved", "first"), [((4,), 5), ((3, 6), 7), ((2, 4, 9), 5)])
def test_what_is_replayed_first_is_the_earliest_step_after_a_checkpoint(tmp_path, saved, first):
    class Recent:
        directory, steps = tmp_path / "samples", [2, 5, 6, 7, 10, 11]

    with pytest.raises(UserError, match=r"samples has the steps from 5 on, and .* has no checkpoint of step 4 or later"):
        replay.begin(Recent, tmp_path, 6)
    for step in saved:
        (tmp_path / f"step_{step:06d}" / "training").mkdir(parents=True)
        (tmp_path / f"step_{step:06d}" / "training" / "state.json").write_text("{}")
    checkpoint, found = replay.begin(Recent, tmp_path, None)
    assert (checkpoint.name, found) == (f"step_{first - 1:06d}", first)


@pytest.mark.parametrize("was_on", [True, False])
def test_a_kl_that_was_off_in_an_earlier_version_is_not_replayed(tmp_path, was_on):
    start = {"after": 0, "flags": {"seed": 3, "use_kl_loss": was_on, "kl_loss_coef": 0.1}}
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "start_000000.json").write_text(json.dumps(start))
    assert Record(tmp_path).start_of(1)["flags"] == {"seed": 3, "kl_loss_coef": 0.1 if was_on else 0.0}


@pytest.mark.slow
def test_a_teacher_s_prompt_that_leaves_rows_out_is_refused(demo_model, tmp_path):
    """The samples would belong to other rows."""
    run = record("train_sync.py", tmp_path, *SMALL, "--filter-overlong-prompts", "--max-prompt-length", 8)
    flags = ["--teacher", "self", "--teacher-prompt", "{ground_truth}={prompt}", "--output-dir", tmp_path]
    done = run_script("replay.py", run, *flags, check=False)
    said = r"samples is of a run with [\d,]+ training prompts, and now there are [\d,]+, so its samples"
    assert done.returncode and re.search(said, done.stderr), done.stderr
