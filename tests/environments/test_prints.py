"""What the user's code prints is limited, for an episode and for a run, and nobody who prints notices."""

import time
from pathlib import Path

import pytest
from test_pool import answers, environments, model  # noqa: F401 a fixture

from rl.rewards import prints
from rl.rewards.pool import RewardArgs, ScoringPool

pytestmark = pytest.mark.timeout(200)

LOUD = """
import os, subprocess, sys, time

def through(kind, text):
    if kind == "print": print(text, flush=True)
    if kind == "stderr": sys.stderr.write(text)
    if kind == "files": os.write(1, text.encode()), os.write(2, text.encode())
    if kind == "a child": subprocess.run(["head", "-c", str(len(text)), "/dev/zero"], check=True)
    if kind == "a fork":
        if not os.fork():
            print(text, flush=True)
            os._exit(0)
        os.wait()

class Loud:
    tools = ()
    def reset(self, row, seed):
        self.kind = row["ground_truth"]
    def step(self, message):
        for _ in range(20): through(self.kind, "x" * (1 << 20))
        return [], 1.0, True

def score(data_source, solution_str, ground_truth, extra_info):
    print(solution_str * (1 << 16), flush=True)
    return 1.0
"""
SLACK = 1 << 14  # the lines that say so


def drain(pool: ScoringPool) -> None:
    deadline = time.monotonic() + 120
    while pool.pending and time.monotonic() < deadline:
        pool.wait(1.0)
    assert not pool.pending


@pytest.fixture
def loud(tmp_path) -> Path:
    (tmp_path / "loud.py").write_text(LOUD)
    return tmp_path / "loud.py"


def test_an_episode_shows_a_little_however_it_prints(model, loud, capfd):  # noqa: F811
    pool = environments(model, f"{loud}:Loud")
    kinds = ("print", "stderr", "files", "a child", "a fork")
    for kind in kinds:
        pool.begin(kind, {"ground_truth": kind, "prompt": []}, seed=1, own_seed=1)
    answers(pool, kinds)
    for kind in kinds:
        pool.ask(kind, "step", ids=[1])
    assert {kind: answer.get("reward") for kind, answer in answers(pool, kinds).items()} == dict.fromkeys(kinds, 1.0)
    pool.close()
    text = capfd.readouterr()
    assert len(text.err) + len(text.out) < len(kinds) * prints.EPISODE_BYTES + SLACK
    assert text.err.count("x") + text.err.count("\0") >= len(kinds) * prints.EPISODE_BYTES - SLACK
    assert text.err.count(prints.OF_EPISODE) == 1


def test_a_run_shows_its_part_over_all_processes_that_were_lost(loud, capfd, monkeypatch):
    """Two scoring processes, of which some are lost, share the limit; the first prints are there."""
    monkeypatch.setattr(prints, "RUN_BYTES", 1 << 20)
    loud.write_text(LOUD.replace("return 1.0", "return os._exit(3) if solution_str == 'e' else 1.0"))
    prints.counter.cache_clear()
    with ScoringPool(RewardArgs(reward=f"{loud}:score", reward_workers=2)) as pool:
        for i in range(60):
            pool.submit(i, "x", "e" if i % 20 == 19 else "y", "1")
        drain(pool)
    text = capfd.readouterr().err
    prints.counter.cache_clear()
    said = prints.OF_RUN.format(1 << 10)
    assert text.count(said) == 1 and (1 << 20) - SLACK < len(text) < (1 << 20) + SLACK


def test_what_is_printed_last_is_not_lost(loud, capfd):
    loud.write_text("def score(**_):\n    print('the last words', flush=True)\n    import os\n    os._exit(3)\n")
    with ScoringPool(RewardArgs(reward=f"{loud}:score")) as pool:
        pool.submit(0, "x", "", "1")
        drain(pool)
    assert "the last words" in capfd.readouterr().err
