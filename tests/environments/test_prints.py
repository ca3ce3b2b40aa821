"""What the user's code prints is limited, for an episode and for a run, and nobody who prints notices."""

from pathlib import Path

import pytest
from test_pool import answers, environments, model  # noqa: F401 a fixture

from rl.environments import prints

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
"""
SLACK = 1 << 14  # the lines that say so


@pytest.fixture
def loud(tmp_path) -> Path:
    (tmp_path / "loud.py").write_text(LOUD)
    return tmp_path / "loud.py"


@pytest.mark.slow
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
