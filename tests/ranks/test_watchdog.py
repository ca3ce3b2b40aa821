"""Jobs that hang on purpose: the watchdog reports each correctly, ends it with its exit code, and leaves no process behind."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, left_over, start

from rl import split
from rl.ranks import dist, process
from rl.ranks.watchdog import EXIT_CODE, report


def hang(*arguments, **how) -> tuple[int, str]:
    """Run it to its end. Return exit code and output. It must leave no process and nothing in shared memory."""
    before = set(os.listdir("/dev/shm"))
    process, mark = start(*arguments, **how)
    return end(process, mark, before)


def end(process: subprocess.Popen, mark: str, before: set[str]) -> tuple[int, str]:
    try:
        text, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.time() + 20
    while (left := left_over(mark)) and time.time() < deadline:
        time.sleep(0.1)
    assert not left
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "rl-ring" in name}
    assert text.count("The job hangs:") == 1, text
    return process.returncode, text


def parts(text: str) -> dict[str, str]:
    """Return the report's part on each rank."""
    whole = text[text.index("==== The job hangs") : text.index("==== End of the report")]
    names = re.findall(r"^---- (.+) \(rank \d+, process \d+ on .+\)$", whole, re.M)
    return dict(zip(names, re.split(r"^---- .+$", whole, flags=re.M)[1:], strict=True))


def table(text: str) -> dict[str, str]:
    """Return each rank and its current call."""
    lines = text[text.index("All ranks, the longest without progress first:") :].splitlines()[1:]
    return dict(line.strip().split(": ", 1) for line in lines[: lines.index("")])


def check_exit_codes(text: str, ranks: int) -> None:
    """Check torchrun's list: a rank that exits last may receive its SIGTERM on the way out."""
    codes = re.findall(r"rank +: \d+ .*\n\s*exitcode +: (-?\d+)", text)
    assert len(codes) == ranks and set(codes) <= {str(EXIT_CODE), str(-signal.SIGTERM), str(128 + signal.SIGTERM)}, text
    assert f"failed (exitcode: {EXIT_CODE})" in text, "the first one, which torchrun calls the cause"


@pytest.mark.timeout(240)
def test_a_reader_that_stops_reading():
    code, text = hang("tests/programs/hung_ranks.py", "ring", ranks=2)
    who, of = table(text), parts(text)
    assert list(of) == ["learner 0", "generator 0"]
    assert re.fullmatch(r"for \d+ s, in update_actor \(\d+ s\)", who["learner 0"])
    state = r"for \d+ s, in (wait \(0 s\)|the code after wait); waits for room in the ring \(\d+ s\)"
    assert re.fullmatch(state, who["generator 0"])
    for part in of.values():  # both sides see the ring that is full
        line = r"^ring: (\d+)% of 1 MiB in use by 3 records \([\d,]+ bytes\); \d+ written, \d+ taken$"
        assert int(re.search(line, part, re.M)[1]) > 70
    assert re.search(r"^records that wait for room in the ring: \d+$", of["generator 0"], re.M)
    assert re.search(r"hung_ranks.py:\d+ in ring: time.sleep\(FOREVER\)", of["learner 0"])
    assert re.search(r"hung_ranks.py:\d+ in ring: time.sleep\(2e-3\)|outbox.flush", of["generator 0"])
    assert code == 1, "torchrun's own code for every failure"
    check_exit_codes(text, ranks=2)


@pytest.mark.timeout(240)
def test_a_learner_stuck_in_a_collective():
    code, text = hang("tests/programs/hung_ranks.py", "collective", ranks=3)
    who, of = table(text), parts(text)
    assert list(of) == ["learner 0", "learner 1", "generator 0"]
    assert "in all_reduce_sum (" in who["learner 0"] and "in version 1 of the weights (" in who["generator 0"]
    line = r"^learner 0 came to collective (\d+) of the learners, gloo:all_reduce; learner 1 has not \(it was in (\d+)\)$"
    began, before = map(int, re.search(line, text, re.M).groups())
    assert began == before + 1 >= 4
    for name, number in (("learner 0", began), ("learner 1", before)):
        assert re.search(rf"^last collective: .*\b{number} of the learners, gloo:all_reduce", of[name], re.M)
    assert re.search(r"dist.py:\d+ in all_reduce_sum: dist.all_reduce\(tensor", of["learner 0"])
    assert re.search(r"hung_ranks.py:\d+ in collective: time.sleep\(FOREVER\)", of["learner 1"])
    assert code == 1
    check_exit_codes(text, ranks=3)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how, first_code", [("breaking", EXIT_CODE), ("killed", -signal.SIGKILL)])
def test_the_report_comes_though_a_connection_breaks_meanwhile(how, first_code):
    """Also if torchrun ends the other ranks after one was killed."""
    code, text = hang("tests/programs/hung_ranks.py", how, ranks=3)
    assert "learner 1 is silent: its process" in text and list(parts(text)) == ["learner 0", "generator 0"]
    assert code == 1 and " stops: " not in text and " failed:\n" not in text and f"failed (exitcode: {first_code})" in text


@pytest.mark.timeout(240)
def test_a_rank_that_is_stopped_is_named():
    code, text = hang("tests/programs/hung_ranks.py", "stopped", ranks=2)
    assert re.search(r"^generator 0 is silent: its process \d+ on .+ does not answer\.$", text, re.M)
    assert list(parts(text)) == ["learner 0"] and "in a record in the ring (" in table(text)["learner 0"]
    assert "of the report: 1 of 2 ranks" in text
    assert code == 1 and f"failed (exitcode: {EXIT_CODE})" in text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_slow_is_not_hung_and_neither_is_a_process_that_was_stopped_for_a_while():
    """Without torchrun: the process's own exit code."""
    before = set(os.listdir("/dev/shm"))
    process, mark = start("tests/programs/hung_ranks.py", "alone")
    pid = int(process.stdout.readline().split()[0])
    os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(pid, signal.SIGCONT)
    code, text = end(process, mark, before)
    assert "got on 7 times" in text[: text.index("The job hangs")], "4 s of work and 4 s stopped"
    assert list(parts(text)) == ["rank 0"] and "in what never comes (" in table(text)["rank 0"]
    assert code == EXIT_CODE


@pytest.mark.timeout(240)
def test_a_training_run_that_hangs(demo_model, tmp_path):
    flags = [
        "--output-dir",
        tmp_path,
        "--reward",
        "tests/programs/slow_reward.py:score",
        "--no-val-before-train",
        "--hang-timeout",
        180,
    ]
    code, text = hang("tests/programs/rough_async.py", *flags, ranks=2, env={"ROUGH": "hung-learner"})
    who, of = table(text), parts(text)
    assert "in the code after wait" in who["learner 0"]
    assert "waits for newer weights" in who["generator 0"]
    assert re.search(r"^groups for the next step: \d+ of 8$", of["learner 0"], re.M)
    assert "in strike: time.sleep(1e6)" in of["learner 0"] and "in generate: " in of["generator 0"]
    assert code == 1 and "failed:\n" not in text
    check_exit_codes(text, ranks=2)


@pytest.mark.parametrize("script", ["train_sync.py", "train_one_step_off.py", "train_async.py"])
def test_every_script_hands_the_flag_on(script, monkeypatch):
    given = []
    monkeypatch.setattr(process, "run", lambda main, join: join())
    monkeypatch.setattr(dist, "init", lambda *timeouts: given.append(timeouts))
    monkeypatch.setattr(split, "init_split", lambda generators, *timeouts: given.append(timeouts))
    for flags, seconds in (([], (1800, 20)), (["--hang-timeout", "7", "--node-timeout", "3"], (7, 3))):
        monkeypatch.setattr(sys, "argv", [script, *flags])
        runpy.run_path(str(ROOT / script), run_name="__main__")
        assert given.pop()[:2] == seconds


def test_a_report_of_ranks_that_ended_and_ranks_that_are_apart():
    def answer(name, idle, **collectives):
        facts = {"ring": "full", "nothing": ""}
        rest = {"place": "host", "in": "wait (70 s)", "waits": ["room (9 s)"], "facts": facts, "stacks": "stack"}
        return {"name": name, "idle": idle, "collectives": collectives} | rest

    at_7 = [7, "gather"]
    answers = [answer("a", 9, world=at_7, bridge=[1, ""]), answer("b", 12, world=at_7), answer("c", 3, world=[6, "sum"])]
    text = report(11.5, answers, ["d has come to its end.", "e is silent."])
    assert "The job hangs: b has made no progress for 11.5 s" in text
    assert "\na and b came to collective 7 of world, gather; c has not (it was in 6)\n" in text and "1 of bridge;" not in text
    assert list(table(text)) == ["b", "a", "c"] and table(text)["a"] == "for 9 s, in wait (70 s); waits for room (9 s)"
    assert "\nd has come to its end.\ne is silent.\n" in text and "3 of 5 ranks" in text and "nothing" not in text
