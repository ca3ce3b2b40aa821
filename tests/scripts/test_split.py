"""The split scripts, started as a user starts them: equal to train_sync.py where they should be, within the staleness bound,
verified at every publish, and ended within seconds when one rank fails."""

import inspect
import json
import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import accuracies, bits, eventually, fates, left_over, start, train, undocumented

import train_async
import train_one_step_off
import train_sync

pytestmark = pytest.mark.runs

REWARD = ["--reward", "tests/programs/slow_reward.py:score"]


@pytest.fixture(scope="module")
def sync(demo_model, tmp_path_factory) -> dict[int, dict]:
    """The metrics of train_sync.py's first two steps."""
    return train("train_sync.py", "--total-training-steps", "2", "--test-freq", "0", out=tmp_path_factory.mktemp("sync"))[0]


@pytest.fixture(scope="module")
def one_step_off(demo_model, tmp_path_factory):
    """A run of 10 steps as a user starts it, and the same run in forks."""
    flags = ("--total-training-steps", "10", "--test-freq", "5", "--val-max-samples", "100", "--use-rollout-log-probs", "False")
    runs = ((fresh, tmp_path_factory.mktemp("off")) for fresh in (True, False))
    return [train("train_one_step_off.py", *flags, out=out, ranks=2, fresh=fresh) for fresh, out in runs]


def test_one_step_off_begins_as_sync_and_is_one_step_off(sync, one_step_off):
    metrics, theirs = one_step_off[0][0], sync
    for name in ("actor/loss", "actor/grad_norm", "critic/score/mean"):
        assert metrics[1][name] == theirs[1][name]
    # batch 1 is made with the starting weights, too: its prompts are sync's, its responses those of version 0
    assert metrics[2]["prompt_length/mean"] == theirs[2]["prompt_length/mean"]
    assert [metrics[step]["staleness/mean"] for step in range(1, 11)] == [0] + 9 * [1]
    assert [metrics[step]["training/epoch"] for step in (1, 10)] == [0, 0]


def test_one_step_off_is_repeatable(one_step_off):
    (_, first, _), (_, second, _) = one_step_off
    assert bits(first) == bits(second)


def test_validation_is_of_the_version_it_names(one_step_off, tmp_path):
    """Greedy validation of the same weights gives the same accuracy, whoever does it."""
    metrics, run, _ = one_step_off[0]
    seen = accuracies(metrics)
    assert sorted(seen) == [0, 5, 10]
    (export,) = run.glob("step_*")
    flags = ("--model", export, "--total-training-steps", "1", "--val-max-samples", "100")
    again, _, _ = train("train_sync.py", *flags, out=tmp_path, ranks=1)
    assert seen[10] == again[0]["val-core/demo/acc/mean@1"] != seen[0]


def test_the_scripts_learn_by_the_same_text():
    for name in ("actor_loss", "learn"):
        sources = {inspect.getsource(getattr(script, name)) for script in (train_sync, train_one_step_off, train_async)}
        assert len(sources) == 1, name
    assert inspect.getsource(train_sync.make_batch) == inspect.getsource(train_one_step_off.make_batch)


@pytest.fixture(scope="module")
def rough(demo_model, tmp_path_factory):
    """A stream with few slots, slow rewards and a slow learner: {mode: (metrics, run, process)}."""
    flags = ["--total-training-steps", "16", "--test-freq", "8", "--max-num-seqs", "12", *REWARD]
    flags += ["--val-max-samples", "24"]
    flags += ["--ppo-mini-batch-size", "4", "--publish-every", "2", "--reward-workers", "4"]
    modes = {
        "drop": "--staleness-threshold 2.5 --max-staleness 1 --generators 2 --rollout-is token",
        "recompute": "--staleness-threshold 1.5 --max-staleness 2 --partial-rollout recompute --loss-mode decoupled_ppo",
        # Of four responses, all are often equally good: groups to filter, whatever the model.
        "off": "--staleness-threshold 0.5 --partial-rollout off --filter-groups --rollout-n 4",
    }
    hows = {"drop": (3, "slow"), "recompute": (2, "slow-decoding"), "off": (2, "slow")}

    def run(mode: str):
        ranks, rough = hows[mode]
        words = [*flags, *modes[mode].split()]
        out = tmp_path_factory.mktemp(mode)
        return train("tests/programs/rough_async.py", *words, out=out, ranks=ranks, env={"ROUGH": rough})

    with ThreadPoolExecutor() as pool:  # they sleep most of the time
        return dict(zip(modes, pool.map(run, modes), strict=True))


def test_no_token_older_than_the_bound_is_trained(rough):
    drop, recompute, off = (rough[mode][0] for mode in ("drop", "recompute", "off"))
    assert max(m.get("staleness/max", 0) for m in drop.values()) == 1
    assert drop[16]["fully_async/count/dropped_stale_samples"] > 0, "the bound had something to do"
    assert 1 <= max(m.get("staleness/max", 0) for m in recompute.values()) <= 2
    assert max(m["fully_async/partial/max_partial_span"] for s, m in recompute.items() if s) >= 1, "they outlived a publish"
    assert max(m["fully_async/partial/max_partial_span"] for s, m in off.items() if s) == 0


def test_every_ticket_is_accounted_for(rough):
    for metrics, _, done in rough.values():
        drawn, trained, dropped, in_flight = fates(done.stdout)
        assert drawn == trained + dropped + in_flight and trained == 16 * 4
        last = metrics[16]
        assert dropped >= last["fully_async/count/dropped_stale_samples"] + last["fully_async/count/filtered_samples"]
    assert rough["off"][0][16]["fully_async/count/filtered_samples"] > 0


def test_every_ranks_time_adds_up(rough):
    for metrics, _, _ in rough.values():
        seen = set()
        for m in metrics.values():
            shares: dict[str, float] = {}
            for name, share in m.items():
                if name.startswith("ledger/"):
                    rank = name.split("/")[1]
                    shares[rank] = shares.get(rank, 0) + share
                    assert -1e-9 <= share <= 1 + 1e-9, name
            assert all(total == pytest.approx(1) for total in shares.values())
            seen |= shares.keys()
        assert {"learner_0", "generator_0"} <= seen
    assert "ledger/generator_1/wait" in set().union(*rough["drop"][0].values())


def test_what_people_watch(rough):
    metrics, _, _ = rough["drop"]
    names = set().union(*metrics.values())
    assert not undocumented(metrics)
    for name in ("fully_async/trainer/idle_ratio", "fully_async/rollouter/idle_ratio", "publish/gb_per_s"):
        assert name in names
    versions = [metrics[step]["fully_async/count/current_param_version"] for step in range(1, 17)]
    assert versions == [(step - 1) // 2 for step in range(1, 17)]
    validated = {m["training/validated_step"] for m in metrics.values() if "training/validated_step" in m}
    assert validated == {0, 8, 16}
    for _, run, _ in rough.values():  # also where two generators divide a validation
        lines = [json.loads(line) for line in (run / "validations.jsonl").read_text().splitlines()]
        assert [(line["step"], line["version"]) for line in lines] == [(0, 0), (8, 4), (16, 8)]


# -------------------------------------------------------------------------------------------------------- failures


def end(process: subprocess.Popen, mark: str) -> str:
    """Its output; it must end by itself, with all that it started, before torchrun loses its patience with a rank and kills
    it."""
    late = threading.Timer(180, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    text, _ = process.communicate()
    late.cancel()
    assert process.returncode != -signal.SIGKILL, text
    assert "forcefully exiting via" not in text, text
    assert eventually(lambda: not left_over(mark))
    return text


@pytest.mark.timeout(200)
def test_a_rank_that_fails_takes_the_job_down_with_one_message(demo_model, tmp_path):
    """test_stops.py kills one."""
    flags = ("--total-training-steps", "500", "--no-val-before-train", "--output-dir", tmp_path, *REWARD)
    process, mark = start("tests/programs/rough_async.py", *flags, ranks=2, env={"ROUGH": "learner"})
    text = end(process, mark)
    assert process.returncode == 1
    assert text.count("learner 0 failed:") == 1 and text.count("failed:\n") == 1, text
    assert "RuntimeError: the learner has had enough" in text


@pytest.mark.timeout(300)
def test_a_stream_from_two_vllm_generators_learns(demo_model, tmp_path):
    pytest.importorskip("vllm")
    flags = ("--engine", "vllm", "--val-max-samples", 100, "--lr-scheduler-type", "constant")
    flags += ("--generators", 2, "--total-training-steps", 20, "--test-freq", 20)
    metrics, _, _ = train("train_async.py", *flags, out=tmp_path, ranks=3, timeout=280, imported="vllm")
    before, after = (accuracies(metrics)[step] for step in (0, 20))
    assert after > before + 0.2
    assert metrics[1]["training/rollout_probs_diff_max"] < 1e-4, "batch 1 is fresh"
    assert {"ledger/generator_0/generate", "ledger/generator_1/generate"} <= set().union(*metrics.values())
