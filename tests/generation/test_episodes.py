"""Responses of several turns: whose tokens are whose, where they end, who scores them, and that none is lost by a stop."""

import json
import random
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from scripted import ScriptedEngine, ScriptedPool, engine_ranks, scripted_job

import train_async
import train_sync
from rl import parts
from rl.data.prompts import Prompt
from rl.generation.engine import Request
from rl.generation.episodes import Episodes
from rl.generation.generator import Generator, Key
from rl.samples.group import UNPENALISED, Group

END, ANSWER = 1, [90, 91, 92]
TURN = [5, 6, END]  # of the model


def plain(id) -> tuple[int, int]:
    """The ticket and the number of a response."""
    return id[0].number, id[1]


class Played:
    """In place of processes: `answer(key, turn, ids)` is what an environment says to the model's turn, counted from 1."""

    def __init__(self, answer, scores_at_end=False, shuffled=False):
        self.answer, self.scores_at_end, self.shuffled = answer, {"": scores_at_end}, shuffled
        self.asked, self.turns, self._pending, self.alive, self.splits = [], {}, [], set(), []

    def name_of(self, row):
        return ""

    def begin(self, key, row, seed, own_seed, split):
        self.alive.add(key)
        self.splits.append(split)
        self.turns[plain(key)] = 0
        self._pending.append((key, {"asked": "reset", "seconds": 0.0, "prompt": row.get("prompt_ids")}))

    def ask(self, key, what, ids=None):
        self.asked.append((plain(key), what, ids))
        if what == "end":
            answer = {"seconds": 0.0, "reward": 0.25}
        else:
            answer = {"seconds": 1.0} | self.said(key, ids)
        self._pending.append((key, {"asked": what} | answer))

    def said(self, key, ids):
        key = plain(key)
        self.turns[key] += 1
        usual = {"reward": None, "done": False, "calls": 1, "malformed": 0, "ids": []}
        return usual | self.answer(key, self.turns[key], ids)

    def end(self, key):
        self.alive.discard(key)

    def poll(self, wait=0.0):
        done, self._pending = self._pending, []
        if self.shuffled:  # some answer later than others
            random.shuffle(done)
            if len(done) > 1 and random.random() < 0.5:
                done, self._pending = done[1:], done[:1]
        return done


def script(request: Request) -> tuple[list[int], list[float]]:
    """Every turn is TURN, behind what there is; one that is cut continues."""
    before = request.so_far
    ids, log_probs = (list(before.token_ids), list(before.log_probs)) if before else ([], [])
    begun = next((n for n in (2, 1) if ids[-n:] == TURN[:n]), 0)
    return ids + TURN[begun:], log_probs + [-1.0] * len(TURN[begun:])


def until(last: int, reward: float | None = None):
    """An environment that ends the episode with its answer to turn `last`."""
    return lambda key, turn, ids: {"done": turn >= last, "ids": [] if turn >= last else ANSWER, "reward": reward}


def make(answer, length=30, n=2, row=None, Args=train_async.Args, script=script, engine=None, ranks=None, **flags):
    """A generator over `answer` and an engine, by default a scripted one."""
    played = answer if isinstance(answer, Played) else Played(answer)
    args = parts.make(Args, rollout_n=n, max_response_length=length, env="file.py:Class", **flags)
    ranks = ranks or engine_ranks()
    job = scripted_job(Prompt([2, 3], "", "demo", "1", {}, "", row=row or {}), environments=played)
    ends = {1, 2, 3, 4, 5, 6} if engine else {END}
    if not engine:
        engine = ScriptedEngine(script, END)
        engine.version = 3
    episodes = Episodes(job, engine, ranks, args, ends)
    return Generator(engine, job, ScriptedPool(7.0), args, ranks, responses=episodes), played


def finish(generator) -> Group:
    done = []
    while not done:
        done = generator.score(generator.decode())
    return done[0]


def played_by(*given, **how) -> tuple[Group, Generator, Played]:
    """A whole group, and what `make` returns."""
    generator, played = make(*given, **how)
    generator.start(0)
    return finish(generator), generator, played


def stopped(*given, steps=6, **how) -> Group | None:
    """A group after so many steps; None if it is whole by then."""
    generator, _ = make(*given, **how)
    generator.start(0)
    if any([generator.score(generator.decode()) for _ in range(steps)]):
        return None
    return Group.from_bytes(generator.unfinished()[0].to_bytes())


def test_turns_and_answers_alternate():
    """Complaint 1: what was sampled is what is trained; the mask is as long as the tokens; an answer's tokens have log-prob 0
    and the version of the token before them."""
    group, generator, played = played_by(until(3, 0.5))
    for number, response in enumerate(group.responses):
        assert response.token_ids.tolist() == TURN + ANSWER + TURN + ANSWER + TURN
        assert response.mask.tolist() == ([True] * 3 + [False] * 3) * 2 + [True] * 3
        assert response.log_probs.tolist() == ([-1.0] * 3 + [0.0] * 3) * 2 + [-1.0] * 3
        assert response.versions.tolist() == [3] * 15 and response.finish_reason == "stop" and response.score == 1.5
        assert [ids for key, _, ids in played.asked if key == (0, number)] == [TURN] * 3
        assert response.extra["turns"] == 3 and response.extra["tool_calls"] == 3 and response.extra["tokens_per_turn"] == 3
        assert response.extra["environment_seconds"] == 3.0
        assert [answered for _, answered in response.seconds] == [1.0] * 3 and min(response.seconds)[0] >= 0
    assert not played.alive and not generator.pool.texts


def test_the_penalty_on_length_counts_the_policy_s_tokens():
    """9 of 15, of which 3 are beyond 30 - 24."""
    group, _, _ = played_by(until(3, 0.5), overlong_buffer_len=24)
    assert [(r.score, r.extra[UNPENALISED]) for r in group.responses] == [(1.5 - 3 / 24, 1.5)] * 2


@pytest.mark.parametrize("row", [{"prompt_ids": [5, 6]}, {}])
def test_a_row_without_a_prompt_needs_one_from_reset(row):
    generator, _ = make(until(1, 0.5), row=row)
    generator.job.prompts[0] = replace(generator.job.prompts[0], ids=[])
    generator.start(0)
    group = finish(generator)
    if row:
        assert group.prompt_ids.tolist() == [5, 6] and [r.score for r in group.responses] == [0.5, 0.5]
    else:
        assert all("the row has no prompt, and reset adds no message" in r.error for r in group.responses)


def test_a_verifier_scores_the_last_turn_where_nobody_has():
    """What a tool has answered is no answer of the model."""
    group, generator, _ = played_by(until(2))
    assert [r.score for r in group.responses] == [7.0, 7.0]
    assert generator.pool.texts == {(0, i): " ".join(map(str, TURN)) for i in range(2)}


@pytest.mark.parametrize("length", [8, 2])
def test_a_turn_that_the_budget_cuts_is_the_last(length):
    """Complaints 13 and 14: the episode ends as "length", no tool runs, and the engine samples nothing after it."""
    group, generator, played = played_by(until(3), length=length)
    whole = [*TURN, *ANSWER, *TURN][:length]
    assert all(r.token_ids.tolist() == whole and r.finish_reason == "length" for r in group.responses)
    assert len(played.asked) == (2 if length == 8 else 0) and not generator.engine.num_unfinished
    assert all(r.extra["cut_by_length"] == 1 and r.score == 7.0 for r in group.responses)


@pytest.mark.parametrize("length", [3, 5, 6])
def test_an_answer_that_does_not_fit_is_left_out_whole(length):
    """Complaint 15; without room for one token behind it, it does not fit either."""
    group, _, _ = played_by(until(3), length=length)
    for response in group.responses:
        assert response.token_ids.tolist() == TURN and response.mask is None and response.finish_reason == "length"
        assert response.extra["cut_by_length"] == 1


def test_an_episode_is_unfinished_while_its_environment_is_at_work():
    """--partial-rollout off: no weights are taken between two turns."""
    generator, _ = make(until(2))
    generator.start(0)
    seen = []
    while not generator.score(generator.decode()):
        seen.append((generator.has_unfinished, generator.engine.num_unfinished > 0))
    assert (True, False) in seen and (False, True) not in seen and not generator.has_unfinished


def test_max_turns_ends_an_episode_after_the_last_answer():
    group, _, played = played_by(Played(until(9), scores_at_end=True), max_turns=2)
    for response in group.responses:
        assert response.token_ids.tolist() == TURN + ANSWER + TURN and response.score == 0.25
        assert response.extra["cut_by_turns"] == 1 and response.finish_reason == "length"
    assert sum(what == "step" for _, what, _ in played.asked) == 4


@pytest.mark.parametrize("turn", [1, 2])
def test_an_environment_that_fails_costs_its_own_response(turn):
    """Complaint 16: unscored, never 0; the others of its group are not touched."""

    def answer(key, at, ids):
        failed = {"event": "timeout", "message": "the environment: slow"} if key[1] == 0 and at == turn else {}
        return until(2, 1.0)(key, at, ids) | failed

    first, *others = played_by(answer, n=3)[0].responses
    assert first.score is None and first.error == "timeout: the environment: slow"
    assert len(first.token_ids) == (3 if turn == 1 else 9)
    assert all(r.score == 2.0 and r.token_ids.tolist() == TURN + ANSWER + TURN for r in others)


class Resets(Played):
    """What a reset answers: `reset(the response's number, how often it was reset)`; number 2's comes after number 1's last
    turn."""

    def __init__(self, reset):
        super().__init__(until(2, 1.0))
        self.reset, self.begun = reset, []

    def begin(self, key, row, seed, own_seed, split):
        super().begin(key, row, seed, own_seed, split)
        self.begun.append((key[1], seed, own_seed))
        self._pending[-1][1].update(self.reset(key[1], [number for number, *_ in self.begun].count(key[1])))

    def poll(self, wait=0.0):
        done = super().poll(wait)
        late = [item for item in done if item[0][1] == 2 and self.turns[0, 1] < 2]
        self._pending += late
        return [item for item in done if item not in late]


def test_the_first_reset_that_succeeds_is_the_group_s_and_nobody_waits_for_the_others():
    failed, own, other = {"event": "died", "message": "gone"}, {"prompt": [2, 3, 4]}, {"prompt": [2, 3, 5]}
    generator, played = make(Resets(lambda number, _: (failed, own, own, other)[number]), n=4)
    generator.start(0)
    while not any(turn for turn in played.turns.values()):
        assert generator.responses.num_unfinished >= 1 and generator.score(generator.decode()) == []
    assert generator.working[Key(False, 0)].requests[2].prompt_ids == [2, 3]  # has not begun
    group = finish(generator)
    assert group.prompt_ids.tolist() == [2, 3, 4]
    assert [r.score for r in group.responses] == [None, 2.0, 2.0, None]
    assert "gone" in group.responses[0].error and "another prompt" in group.responses[3].error
    assert generator.responses.num_unfinished == 0 and not played.alive
    group, generator, _ = played_by(Resets(lambda *_: failed), n=2)  # nobody's: the group keeps its prompt
    assert [r.score for r in group.responses] == [None] * 2 and generator.responses.num_unfinished == 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_reset_that_fails_is_tried_once_more(times):
    """With the same seeds. Nothing has been sampled, and no tool was called."""
    failed = {"event": "error", "message": "ConnectionError"}
    group, _, played = played_by(Resets(lambda number, tries: failed if number == 0 and tries <= times else {}), n=2)
    first, other = group.responses
    assert other.score == 2.0 and other.extra["restarts"] == 0 and first.extra["restarts"] == 1
    assert (first.score, first.error) == ((2.0, None) if times == 1 else (None, "error: ConnectionError"))
    tries = [seeds for number, *seeds in played.begun if number == 0]
    assert len(tries) == 2 and tries[0] == tries[1] and not played.alive


def test_what_reset_adds_is_the_group_s_prompt():
    """Complaint 21: training and validation see the same first prompt. The environment learns which of the two it is."""
    prompts = []
    generator, played = make(until(1), row={"prompt_ids": [2, 3, 4, 8]})
    generator.engine.script = lambda request: prompts.append(request.prompt_ids) or script(request)
    generator.start(0)
    assert finish(generator).prompt_ids.tolist() == [2, 3, 4, 8] and prompts == [[2, 3, 4, 8]] * 2
    generator.start_validation()
    while generator.is_validating:
        generator.score(generator.decode())
    assert prompts[2:] == [[2, 3, 4, 8]] and generator.take_rows()[0]["score"] == 7.0
    assert played.splits == ["train", "train", "val"]
    group, _, _ = played_by(until(1), row={"prompt_ids": [2] * 65})
    assert all(r.score is None and "--max-prompt-length" in r.error for r in group.responses)


def varied(key, turn, ids):
    """As many turns as the response's number, and other answers each."""
    return {"done": turn > key[1], "ids": [] if turn > key[1] else [80 + turn] * (1 + key[1]), "reward": float(turn)}


@pytest.mark.parametrize("steps", range(1, 18, 2))
def test_a_stop_loses_nothing(steps):
    """Complaint 20: stopped after any step, as a kill between two tokens does, and resumed from the record."""
    expected, _, _ = played_by(varied, n=4)
    if not (group := stopped(varied, n=4, steps=steps)):
        return
    resumed, played = make(varied, n=4)
    resumed.start(0, group)
    found = finish(resumed)
    for r, e in zip(found.responses, expected.responses, strict=True):
        assert r.token_ids.tolist() == e.token_ids.tolist() and r.log_probs.tolist() == e.log_probs.tolist()
        masks = [np.ones(len(x.token_ids), bool) if x.mask is None else x.mask for x in (r, e)]
        assert np.array_equal(*masks) and r.score == e.score and r.extra == e.extra and r.finish_reason == e.finish_reason
    assert not played.alive


def test_responses_that_another_prompt_began_start_again():
    """Reset has added a message before the stop, and adds none now."""
    group = stopped(until(3, 1.0), row={"prompt_ids": [2, 3, 4, 8]})
    resumed, _ = make(until(3, 1.0))
    added = []
    resumed.engine.script = lambda request: added.append(request) or script(request)
    resumed.start(0, group)
    assert all(r.extra["restarts"] == 1 and r.score == 3.0 for r in finish(resumed).responses)
    assert added[0].so_far is None and {tuple(request.prompt_ids) for request in added} == {(2, 3)}


def test_a_stop_right_behind_another_loses_nothing():
    """Before its environments are reset a resumed episode is what was recorded of it."""
    group = stopped(until(3, 1.0))
    resumed, _ = make(until(3, 1.0))
    resumed.start(0, group)
    assert [replace(g).to_bytes() for g in resumed.unfinished()] == [group.to_bytes()]


def test_an_environment_that_answers_otherwise_starts_its_response_again():
    group = stopped(until(3, 1.0))
    assert [len(r.token_ids) for r in group.responses] == [9, 9]
    other = lambda key, turn, ids: until(3, 1.0)(key, turn, ids) | ({"ids": [70]} if key[1] == 0 and turn < 3 else {})  # noqa: E731
    resumed, _ = make(other)
    resumed.start(0, group)
    done = []
    while not done:
        done = resumed.score(resumed.decode())
        assert all(len(g.responses) == 2 for g in resumed.unfinished())  # a checkpoint can be saved at any time
    first, second = done[0].responses
    assert first.token_ids.tolist() == [*TURN, 70, *TURN, 70, *TURN] and first.extra["restarts"] == 1
    assert first.mask.tolist() == [True] * 3 + [False] + [True] * 3 + [False] + [True] * 3 and first.score == 3.0
    assert second.token_ids.tolist() == TURN + ANSWER + TURN + ANSWER + TURN and second.extra["restarts"] == 0


def test_in_lock_step_results_do_not_depend_on_who_answers_first(monkeypatch):
    """train_sync.py with --over-sample: which groups end first, and in which order the engine gets them, is the same."""
    for module in ("episodes", "episode"):
        monkeypatch.setattr(f"rl.generation.{module}.time", SimpleNamespace(monotonic=lambda: 0.0))  # turns are timed
    seen = set()
    for seed in range(6):
        random.seed(seed)
        generator, _ = make(Played(varied, shuffled=True), n=3, Args=train_sync.Args)
        added = []
        generator.engine.script = lambda request, added=added: added.append((request.id, request.so_far)) or script(request)
        generator.start(100)
        groups = generator.generate([0]) + generator.generate([1])
        seen.add(repr((groups, added)))
    assert len(seen) == 1


class Free(train_sync.Args):
    in_lock_step = False


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_share_an_engine_do_the_same(seed):
    """Through batches that put episodes aside, failures and a validation: the other rank, which has no process, adds the same
    requests, and is in the same place when it hears of the first rank's messages, one a poll."""

    def failing(key, turn, ids):
        return {"event": "died", "message": "gone"} if (sum(key) + turn) % 5 == 0 else varied(key, turn, ids)

    def agree(said, is_leader):
        if is_leader:
            messages.append((place, said))
            return said
        theirs, said = messages.popleft()
        assert theirs == place
        return json.loads(json.dumps(said))  # as ranks send it

    random.seed(seed)
    messages, added, groups = deque(), [], []
    for is_leader in (True, False):
        ranks = SimpleNamespace(is_leader=is_leader, size=2, index=0, engines=1, agree=partial(agree, is_leader=is_leader))
        flags = {"n": 3, "Args": Free, "val_n": 3}
        generator, played = make(Played(failing, shuffled=True), ranks=ranks, **flags)
        requests, pending = [], generator.pool.pending
        generator.engine.script = lambda request, to=requests: to.append((request.id, request.so_far)) or script(request)

        def late(_=0.0, its=pending):
            return [its.pop(0)] if its and random.random() < 0.3 else []

        generator.pool.wait = late
        generator.start(100)
        generator.start(101)
        place = "first batch"
        tickets = [group.ticket for group in generator.generate([0, 1])]
        place = "validation"
        generator.start_validation()
        while generator.is_validating:
            generator.score(generator.decode(), wait=0.0)
        place = "second batch"
        groups.append(tickets + [group.ticket for group in generator.generate([2, 3])])
        added.append(requests)
        assert is_leader or not played.turns
    assert added[0] == added[1] and not messages and groups[0] and not groups[1]
