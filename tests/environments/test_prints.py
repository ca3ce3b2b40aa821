"""What the user's code prints is limited, and nobody who prints notices."""

import os
import threading

import pytest
from test_pool import answers

from user_code import server

LOUD = """
import os, subprocess, sys

def through(kind, text):
    if kind == "print": print(text, flush=True)
    if kind == "files": os.write(1, text.encode()), os.write(2, text.encode())
    if kind == "a child": subprocess.run(["head", "-c", str(len(text)), "/dev/zero"], check=True)

class Loud:
    tools = ()
    def reset(self, row, seed):
        self.kind = row["ground_truth"]
    def step(self, message):
        for _ in range(20): through(self.kind, "x" * (1 << 18))
        return [], 1.0, True
"""
SLACK = 1 << 10  # the lines that say so


@pytest.mark.parametrize(("written", "left_out"), [(1 << 20, False), ((1 << 20) + 1, True), (3 << 20, True)])
def test_the_first_bytes_are_passed_on(written, left_out, capfd, monkeypatch):
    monkeypatch.setattr(server, "PRINTED", 1 << 20)
    reading, writing = os.pipe()
    passing = threading.Thread(target=server._pass_on, args=(os.fdopen(reading, "rb"), "it"))
    passing.start()
    with open(writing, "wb") as pipe:
        pipe.write(b"x" * written)
    passing.join(60)
    said = capfd.readouterr().err
    assert said.count("x") == min(written, 1 << 20) and said.count("warning: what it prints is left out") == left_out


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_episodes_show_a_little_however_they_print(make_pool, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(server, "PRINTED", 1 << 20)
    (tmp_path / "loud.py").write_text(LOUD)
    pool = make_pool(f"{tmp_path / 'loud.py'}:Loud")
    kinds = ("print", "files", "a child")
    for kind in kinds:
        pool.begin(kind, {"ground_truth": kind, "prompt": []}, seed=1, own_seed=1)
    answers(pool, kinds)
    for kind in kinds:
        pool.ask(kind, "step", ids=[1])
    assert {kind: answer.get("reward") for kind, answer in answers(pool, kinds).items()} == dict.fromkeys(kinds, 1.0)
    pool.close()
    text = capfd.readouterr()
    assert not text.out and (1 << 20) - SLACK < len(text.err) < (1 << 20) + SLACK
    assert text.err.count("is left out from here on") == 1
