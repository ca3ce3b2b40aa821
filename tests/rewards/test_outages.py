"""A grader that does not answer for a while costs time, not responses."""

from contextlib import closing

import pytest
from helpers import bits, train

from rl.generation.generator import Key
from rl.rewards.args import RewardArgs
from rl.rewards.outages import FAILURES, LONGEST_PAUSE, LastScored, Outages
from rl.rewards.pool import ScoringPool
from rl.rewards.score import Score
from user_processes.tape import Tape

GOOD, BAD = Score(1.0), Score(None, event="error", message="the judge is gone")
OUT = Score(None, event="outage", message="error: the judge is gone")


LAST = LastScored("d")


class Grader:
    """Outages with a clock of their own. Responses that are to be scored again are in `asked`. repeats: False for an
    environment."""

    def __init__(self, seconds: float = 600.0, repeats: bool = True):
        self.now, self.asked, self.repeats = 0.0, [], repeats
        self.outages = Outages(seconds, "mine.py:score", self.asked.append, clock=lambda: self.now, repeats=repeats)

    def take(self, score: Score, *keys, source: str = "d") -> list:
        return [found for key in keys for found in self.outages.take(source, key, score)]

    def look(self, nothing_comes: bool = False) -> list:
        return self.outages.look(nothing_comes)

    def go_out(self) -> None:
        """Fail on the responses 0 to FAILURES - 1."""
        assert self.take(GOOD, "first") == [("first", GOOD)]
        assert self.take(BAD, *range(FAILURES)) == []
        if self.repeats:
            assert self.asked == [LAST] and self.take(BAD, self.asked.pop()) == [], "it cannot repeat what it could"
        assert self.outages.is_one and self.outages.waiting == FAILURES


@pytest.mark.parametrize("repeats", [True, False])
def test_responses_of_an_outage_are_scored_once_it_ends(repeats, capsys):
    grader = Grader(repeats=repeats)
    grader.go_out()
    pauses = []
    for _ in range(9):
        began = grader.now
        while not grader.asked:
            grader.now += 0.5
            assert grader.look(True) == []
        pauses.append(grader.now - began)
        assert grader.take(BAD, grader.asked.pop()) == []
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    grader.now += LONGEST_PAUSE
    grader.look()
    (first,) = grader.asked
    assert grader.take(GOOD, first) == ([] if repeats else [(first, GOOD)])
    assert not grader.outages.is_one and not grader.outages.waiting
    assert {*grader.asked} - {LAST} == {*range(FAILURES)}, "the one that showed it, and then the others"
    assert grader.take(GOOD, *grader.asked[1:]) == [(key, GOOD) for key in grader.asked[1:]]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "mine.py:score: 16 responses of d in a row" in said[0] and "the judge is gone" in said[0]
    assert said[1].startswith("note: ") and "are scored again, after " in said[1]


def test_single_failures_are_final_at_the_next_score():
    grader = Grader()
    grader.take(GOOD, "first")
    assert grader.take(BAD, 1, 2) == [] and grader.look() == []
    assert grader.take(GOOD, 3) == [(1, BAD), (2, BAD), (3, GOOD)]
    for key in range(10 * FAILURES):  # every second one
        grader.take(BAD if key % 2 else GOOD, key)
    assert not grader.outages.is_one and not grader.asked


@pytest.mark.parametrize("failures", [1, FAILURES - 1, 5 * FAILURES])
def test_a_grader_that_still_scores_what_it_scored_is_not_out(failures, capsys):
    """The last responses of a step fail, because they are slow, or all of one prompt."""
    grader = Grader()
    grader.take(GOOD, "first")
    assert grader.take(BAD, *range(failures)) == [] and grader.look(nothing_comes=True) == []
    assert grader.asked == [LAST] and grader.outages.is_one, "it is being found out"
    if failures >= FAILURES:
        assert grader.take(GOOD, LAST) == [] and grader.asked[1:] == [*range(failures)], "they may try once more"
        assert grader.take(BAD, *grader.asked[1:]) == []
    assert grader.take(GOOD, LAST) == [(key, BAD) for key in range(failures)]
    assert not grader.outages.is_one and not grader.outages.waiting and not capsys.readouterr().err


def test_the_last_responses_of_a_step_show_an_outage():
    """However few a step has."""
    grader = Grader()
    grader.take(GOOD, "first")
    assert grader.take(BAD, 1) + grader.look(nothing_comes=True) == []
    assert grader.take(BAD, LAST) == [] and grader.outages.is_one and grader.outages.waiting == 1


def test_a_function_that_never_worked_is_not_out():
    grader = Grader()
    assert grader.take(BAD, *range(99)) == [(key, BAD) for key in range(99)] and not grader.outages.is_one


def test_no_time_turns_waiting_off():
    grader = Grader(seconds=0)
    grader.go_out()
    assert grader.look() == [(key, OUT) for key in range(FAILURES)] and not grader.outages.is_one
    agents = Grader(seconds=0, repeats=False)
    agents.take(GOOD, "first")
    assert agents.take(BAD, *range(99)) == [(key, BAD) for key in range(99)] and not agents.asked


@pytest.mark.parametrize("repeats", [True, False])
def test_a_long_outage_leaves_responses_without_a_score(repeats, capsys):
    """Also those that are being scored at its end, and later ones until the grader works; then it may go out again."""
    grader = Grader(seconds=100, repeats=repeats)
    lost = OUT if repeats else BAD
    grader.go_out()
    grader.now = 1.0
    grader.look()
    grader.now = 101.0
    left = grader.look()
    assert len(left) == FAILURES - (not repeats) and all(score == lost for _, score in left)
    assert grader.take(BAD, *grader.asked) == ([] if repeats else [(grader.asked[0], BAD)])
    assert grader.take(BAD, *range(99)) == [(key, lost) for key in range(99)] and not grader.outages.is_one
    assert "could not be scored for 100 s" in capsys.readouterr().err
    grader.asked.clear()
    grader.go_out()


def test_a_score_asked_for_before_others_failed_does_not_end_their_wait():
    grader = Grader(repeats=False)
    assert grader.take(GOOD, "first") == [("first", GOOD)]
    grader.now = 10.0
    assert grader.take(BAD, *range(FAILURES - 1)) == []
    early = grader.outages.take("d", "early", GOOD, asked=9.0)
    assert early == [("early", GOOD)] and grader.outages.waiting == FAILURES - 1
    assert grader.take(BAD, "last") == [] and grader.outages.is_one
    assert grader.outages.take("d", "still early", GOOD, asked=9.5) == [("still early", GOOD)] and grader.outages.is_one
    assert grader.outages.take("d", "later", GOOD, asked=10.5) == [("later", GOOD)] and not grader.outages.is_one
    assert grader.asked == [*range(FAILURES - 1), "last"]


def test_an_outage_is_of_one_source():
    """The judge of one is gone, and the rule of another works."""
    grader = Grader()
    grader.take(GOOD, "e", source="e")
    grader.go_out()
    assert grader.take(GOOD, "e2", source="e") == [("e2", GOOD)] and grader.outages.is_one
    assert grader.take(BAD, "e3", source="e") + grader.look(nothing_comes=True) == []
    assert grader.take(GOOD, LastScored("e"), source="e") == [("e3", BAD)]
    assert grader.outages.waiting == FAILURES


FICKLE = """
import itertools, pathlib
calls = itertools.count()
failed = pathlib.Path(__file__).with_name("failed")
failed.touch()
def score(data_source, solution_str, ground_truth, extra_info):
    if next(calls) >= {good} and len(failed.read_text()) < {bad}:
        failed.open("a").write("x")
        raise ConnectionError("the judge is gone")
    return float(len(solution_str) % 2)
"""


def fickle(folder, good: int, bad: int):
    """Write a reward function that fails on `bad` calls after `good` ones, and then works again. Return its name."""
    folder.mkdir()
    (folder / "mine.py").write_text(FICKLE.format(good=good, bad=bad))
    return folder / "mine.py:score"


def test_a_pool_scores_all_responses_of_an_outage(tmp_path, capfd):
    """And records them: the last that it scored, which shows whether the grader works, is on the tape once."""
    ids = [(Key(False, number), 0) for number in range(40)]
    tape = Tape(str(tmp_path / "tape"), None)
    with closing(ScoringPool(RewardArgs(reward=str(fickle(tmp_path / "x", good=5, bad=37))))) as pool:
        tape.serve(pool, None, None)
        for number, id in enumerate(ids):
            pool.submit(id, "d", "1" * number, "", None)
        found = []
        while pool.pending:
            found += pool.wait(0.2)
    assert sorted(found) == [(id, Score(float(number % 2))) for number, id in enumerate(ids)]
    assert not pool.events and "ConnectionError: the judge is gone" in capfd.readouterr().err
    assert [[*tape.read(tape.place(id)).values()] for id in ids] == [[{"value": float(number % 2)}] for number in range(40)]


@pytest.mark.runs
@pytest.mark.parametrize(("script", "ranks"), [("train_sync.py", None), ("train_one_step_off.py", 2), ("train_async.py", 2)])
def test_a_run_that_waited_trains_the_bits_of_one_that_had_no_outage(script, ranks, tmp_path):
    flags = ["--total-training-steps", 4, "--test-freq", 0, "--lr", 1e-3]
    flags += ["--staleness-threshold", 0] if script == "train_async.py" else []
    found = {}
    for name, bad in (("with", 60), ("without", 0)):
        reward = fickle(tmp_path / f"reward-{name}", good=70, bad=bad)
        found[name] = train(script, *flags, "--reward", reward, out=tmp_path / name, ranks=ranks)
    metrics, run, done = found["with"]
    assert len((tmp_path / "reward-with" / "failed").read_text()) == 60
    assert "in a row could not be scored" in done.stderr and "are scored again, after" in done.stderr
    assert all(metrics[step]["reward/unscored"] == 0 for step in range(1, 5))
    assert bits(run) == bits(found["without"][1])
