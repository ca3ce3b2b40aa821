"""The demo's model: how well a new model adds, and when its pre-training stops."""

import re

import pytest
import torch
from helpers import greedy_answers
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo import sums as demo


def of_split(split: str) -> list[tuple[list[dict], int]]:
    return [(p["prompt"], int(p["reward_model"]["ground_truth"])) for p in demo.problems(split)]


def test_the_model_adds_but_usually_says_another_sum(demo_model):
    """Most of its answers are the sum, or the sum plus or minus 10. Less than half are right."""
    prompts, sums = zip(*of_split("val"), strict=True)
    answers = [int(said) if said.isdecimal() else -1 for said in greedy_answers(demo_model, prompts)]
    off = [abs(said - true) for said, true in zip(answers, sums, strict=True)]
    assert sum(x in (0, 10) for x in off) > 0.75 * len(off)
    assert 0.2 < sum(x == 0 for x in off) / len(off) < 0.5


def test_how_often_it_is_right_while_it_is_made_is_what_greedy_decoding_gives(demo_model):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(demo_model), AutoTokenizer.from_pretrained(demo_model)
    prompts, sums = zip(*of_split("val")[:100], strict=True)
    pairs = [map(int, re.findall(r"\d+", prompt[0]["content"])) for prompt in prompts]
    rows = [demo._demonstration(tokenizer, *pair, true) for pair, true in zip(pairs, sums, strict=True)]
    right = [said == str(true) for said, true in zip(greedy_answers(demo_model, prompts), sums, strict=True)]
    assert demo.share_right(model, rows) == pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize(("every", "steps"), [(1, 4), (3, 6), (20, 10)])
def test_a_phase_ends_when_it_is_done_or_at_its_last_step(every, steps):
    """It is asked now and then; here it is done from the fourth time on."""
    weight = torch.nn.Linear(1, 1)
    taken = []

    def loss() -> torch.Tensor:
        taken.append(len(taken))
        return weight(torch.ones(1)).sum()

    phase = demo.Phase("x", 10, loss, 1e-3, ends=lambda: len(taken) >= 4, every=every)
    demo.train_in(weight, [phase], "x")
    assert len(taken) == steps
