"""What a teacher reads (--teacher-prompt): the template with the row's values, for the rows that the policy is trained on."""

from pathlib import Path

import pytest
from test_data import dataset, write
from transformers import AutoTokenizer

from rl.data.prompts import PromptOrder
from rl.data.teacher_prompts import TeacherPrompts
from rl.errors import UserError

CHAT = "<|user|>{}<|assistant|>"


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


def row(prompt: object, **more) -> dict:
    return {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": "3"}} | more


def read(tmp_path: Path, tokenizer, rows: list[dict], template: str, **flags):
    """The policy's prompts and the teacher's."""
    prompts = dataset(write(tmp_path / "rows.jsonl", *rows), tokenizer=tokenizer, **{"max_prompt_length": 40} | flags)
    return prompts, TeacherPrompts(prompts, template)


def texts(rows: TeacherPrompts) -> list[str]:
    return [prompt.text for prompt in rows]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{prompt}", "1+2="),
        ("{ground_truth}={prompt}", "3=1+2="),
        ("{prompt}{steps}{hint}", "1+2=1+1+17"),
        ("{{prompt}}{}{1+1}", "{1+2=}{}{1+1}"),
        ("{reversed}{prompt}", "{prompt}1+2="),
    ],
)
def test_names_stand_for_what_the_row_has(tmp_path, tokenizer, template, text):
    """A column, a key of extra_info, numbers, and text with braces of its own."""
    messages = [{"role": "user", "content": "4+4="}, {"role": "assistant", "content": "8"}, {"role": "user", "content": "1+2="}]
    rows = [row(messages, steps="1+1+1", reversed="{prompt}", extra_info={"hint": 7})]
    prompts, its = read(tmp_path, tokenizer, rows, template)
    rendered = its._render("", its.tables[0][0]).text  # the demo's tokenizer has no braces
    assert rendered == f"<|user|>4+4=<|assistant|>8<|end|>{CHAT.format(text)}"
    assert prompts[0].text == f"<|user|>4+4=<|assistant|>8<|end|>{CHAT.format('1+2=')}"


def test_a_prompt_that_is_a_string_is_replaced_as_a_whole(tmp_path, tokenizer):
    _, its = read(tmp_path, tokenizer, [row("1+2=")], "{ground_truth}+0={prompt}")
    assert texts(its) == ["3+0=1+2="]


def test_questions_and_answers_can_show_the_whole_answer(tmp_path, tokenizer):
    rows = [{"question": "1+2=", "answer": "2+1=3\n#### 3"}]
    _, its = read(tmp_path, tokenizer, rows, "{prompt}{ground_truth}{answer}")
    assert its._render("", its.tables[0][0]).text == CHAT.format("1+2=32+1=3\n#### 3")


def test_the_teachers_prompt_is_that_of_the_ticket(tmp_path, tokenizer):
    rows = [row([{"role": "user", "content": f"{n}+0="}], sum=n) for n in range(9)]
    prompts, its = read(tmp_path, tokenizer, rows, "{sum}={prompt}")
    order = PromptOrder(9, seed=3)
    for ticket in range(20):
        number = order(ticket)[1]
        ids = its.ids_of(order, ticket, prompts[number].ids)
        assert tokenizer.decode(ids) == CHAT.format(f"{number}={number}+0=")
    with pytest.raises(UserError, match=r"row 4: the responses of ticket .* follow another prompt"):
        its.ids_of(lambda ticket: (0, 4), 0, prompts[5].ids)


def test_what_a_row_lacks_is_named(tmp_path, tokenizer):
    rows = [row([{"role": "user", "content": "1+2="}], hint=hint) for hint in ("1", None)]
    with pytest.raises(UserError, match=r"rows\.jsonl row 1: nothing is there for \{hint\}.* The row has data_source, ground_"):
        read(tmp_path, tokenizer, rows, "{hint}{prompt}")


def test_long_prompts_are_refused_or_leave_both_sides(tmp_path, tokenizer):
    rows = [row([{"role": "user", "content": "1+2="}], hint="1" * n) for n in (3, 20, 4, 5, 40)]
    with pytest.raises(UserError, match=r"row 1: the teacher's prompt has 26 tokens, more than 12\. Raise --max"):
        read(tmp_path, tokenizer, rows, "{hint}{prompt}", max_prompt_length=12)
    prompts, its = read(tmp_path, tokenizer, rows, "{hint}{prompt}", max_prompt_length=11, filter_overlong_prompts=True)
    assert texts(its) == [CHAT.format("1" * n + "1+2=") for n in (3, 4, 5)]
    assert [prompt.where for prompt in prompts] == [prompt.where for prompt in its] and len(prompts) == 3
