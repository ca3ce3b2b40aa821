"""A response that holds tokens of others keeps its mask, however often it is stopped and continued."""

import numpy as np
import pytest
from scripted import ScriptedEngine, ScriptedPool, engine_ranks, scripted_job

import train_async
from rl import parts
from rl.data.prompts import Prompt
from rl.generation.engine import Output
from rl.generation.generator import Generator
from rl.samples.group import UNPENALISED, Group, Response

TOKENS = [5, 6, 7, 8, 9, 1]  # of every response, the last the end token


def make_generator(leads: bool = True) -> Generator:
    args = parts.make(train_async.Args, rollout_n=3, max_response_length=6, overlong_buffer_len=4)
    engine = ScriptedEngine(lambda request: (TOKENS, [-1.0] * len(TOKENS)), eos_token_id=1)
    job = scripted_job(Prompt([2, 3], "", "demo", "1", {}, ""))
    return Generator(engine, job, ScriptedPool(), args, engine_ranks(leads))


def group_of(ticket: int, *responses: Response) -> Group:
    return Group(ticket, np.array([2, 3], np.int32), "demo", [*responses])


def begun(mask: list[int] | None, n: int, reason: str) -> Response:
    sampled = None if mask is None else np.array(mask, bool)
    log_probs = np.full(n, -1, np.float32) * (1 if sampled is None else sampled)
    return Response(np.array(TOKENS[:n], np.int32), log_probs, np.zeros(n, np.int32), reason, mask=sampled)


OVER = [begun(None, 6, "stop")] * 3


@pytest.mark.parametrize("stops", [0, 1, 3])
def test_an_unfinished_response_keeps_its_mask(stops):
    """Of a prompt: one that is under way, one that has ended, and a plain one. Between two tokens the generator is stopped, and
    another one resumes."""
    group = group_of(4, begun([0, 1, 0], 3, "unfinished"), begun([0, 1, 0, 0, 0, 1], 6, "stop"), begun(None, 1, "unfinished"))
    generator = make_generator()
    generator.start(4, group)
    for number in range(stops):
        assert generator.score(generator.decode()) == []  # scores the response that had ended
        assert generator.score(generator.decode()) == []
        (group,) = generator.unfinished()
        group = Group.from_bytes(group.to_bytes())
        masks = [None if r.mask is None else r.mask.tolist() for r in group.responses]
        assert masks == [[False, True, False] + [True] * (1 + number), [False, True, False, False, False, True], None]
        generator = make_generator()
        generator.start(4, group)
    done = []
    while not done:
        done = generator.score(generator.decode())
    first, second, plain = done[0].responses
    assert first.mask.tolist() == [False, True, False, True, True, True] and plain.mask is None
    assert second.mask.tolist() == [False, True, False, False, False, True]
    assert all(r.token_ids.tolist() == TOKENS for r in done[0].responses)
    # --overlong-buffer-len 4 of 6: the policy's tokens beyond 2 cost a fourth each
    assert [r.score for r in done[0].responses] == [1 - 2 / 4, 1.0, 1 - 4 / 4]
    assert [r.extra[UNPENALISED] for r in done[0].responses] == [1.0] * 3


@pytest.mark.parametrize("leads", [True, False])
def test_a_resumed_prompt_whose_responses_had_ended_leaves_every_rank_of_an_engine(leads):
    generator = make_generator(leads)
    generator.start(4, group_of(4, *OVER))
    generator.start(5)
    done = []
    for _ in range(2 + len(TOKENS)):
        done += generator.score(generator.decode(), wait=0)
    assert [group.ticket for group in done] == ([4, 5] if leads else [])
    assert not generator.working


@pytest.mark.parametrize("leads", [True, False])
def test_such_a_prompt_is_among_a_step_s_first_on_every_rank_of_an_engine(leads):
    generator = make_generator(leads)
    generator.start(4, group_of(4, *OVER))
    assert [group.ticket for group in generator.generate([5])] == ([4] if leads else [])
    assert generator.tickets == ([5] if leads else []) and len(generator.working) == 1


def test_a_validation_takes_no_prompt_that_ended_in_a_step():
    """The step had enough prompts before it began; one that ends as it starts is for the next step."""
    generator = make_generator()
    for ticket in (4, 6):
        generator.start(ticket, group_of(ticket, *OVER))
    assert [group.ticket for group in generator.generate([7])] == [4]
    generator.start(8, group_of(8, *OVER))
    assert [group.ticket for group in generator.generate([9])] == [6]
    assert generator.score(generator.decode(), wait=0) == [] and 8 in generator.tickets  # as `validate` does
    assert [group.ticket for group in generator.generate([10])] == [8]


def test_what_is_paused_keeps_its_mask():
    """train_sync.py with --over-sample: a step ends while another prompt is under way, which continues in the next."""
    generator = make_generator()
    generator.start(1, group_of(1, *[begun(None, 5, "unfinished")] * 3))
    generator.start(2, group_of(2, *[begun([1, 0], 2, "unfinished")] * 3))
    (first,) = generator.generate([9])
    assert first.ticket == 1 and generator.tickets == [2, 9]
    masks = {group.ticket: [r.mask for r in group.responses] for group in generator.unfinished()}
    assert masks[9] == [None] * 3 and [m.tolist() for m in masks[2]] == [[True, False, True]] * 3
    generator.engine.abort()
    assert any(isinstance(output, Output) for output in generator.responses.unfinished())
