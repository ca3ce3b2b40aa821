"""A prompt all of whose responses had ended when a run stopped is among the first that the resumed run hands over."""

import numpy as np
import pytest
from scripted import ScriptedEngine, ScriptedPool, engine_ranks, scripted_job

import train_async
from rl import parts
from rl.data.prompts import Prompt
from rl.generation.generator import Generator
from rl.samples.group import Group, Response

TOKENS = [5, 6, 7, 8, 9, 1]  # of every response, the last the end token


def make_generator(leads: bool = True) -> Generator:
    args = parts.make(train_async.Args, rollout_n=3, max_response_length=6)
    engine = ScriptedEngine(lambda request: (TOKENS, [-1.0] * len(TOKENS)), eos_token_id=1)
    job = scripted_job(Prompt([2, 3], "", "demo", "1", {}, ""))
    return Generator(engine, job, ScriptedPool(), args, engine_ranks(leads))


def ended(ticket: int) -> Group:
    """A prompt whose responses had all ended when the run stopped."""
    arrays = np.array(TOKENS, np.int32), np.full(len(TOKENS), -1, np.float32), np.zeros(len(TOKENS), np.int32)
    return Group(ticket, np.array([2, 3], np.int32), "demo", [Response(*arrays, "stop")] * 3)


@pytest.mark.parametrize("leads", [True, False])
def test_a_resumed_prompt_whose_responses_had_ended_leaves_every_rank_of_an_engine(leads):
    generator = make_generator(leads)
    generator.start(4, ended(4))
    generator.start(5)
    done = []
    for _ in range(2 + len(TOKENS)):
        done += generator.score(generator.decode(), wait=0)
    assert [group.ticket for group in done] == ([4, 5] if leads else [])
    assert not generator.working


@pytest.mark.parametrize("leads", [True, False])
def test_such_a_prompt_is_among_a_step_s_first_on_every_rank_of_an_engine(leads):
    generator = make_generator(leads)
    generator.start(4, ended(4))
    assert [group.ticket for group in generator.generate([5])] == ([4] if leads else [])
    assert generator.tickets == ([5] if leads else []) and len(generator.working) == 1


def test_a_validation_takes_no_prompt_that_ended_in_a_step():
    """The step had enough prompts before it began; one that ends as it starts is for the next step."""
    generator = make_generator()
    for ticket in (4, 6):
        generator.start(ticket, ended(ticket))
    assert [group.ticket for group in generator.generate([7])] == [4]
    generator.start(8, ended(8))
    assert [group.ticket for group in generator.generate([9])] == [6]
    assert generator.score(generator.decode(), wait=0) == [] and 8 in generator.tickets  # as `validate` does
    assert [group.ticket for group in generator.generate([10])] == [8]
