"""Conversations to imitate: which tokens are trained, and what is refused, with file, row and remedy."""

from pathlib import Path

import pytest
from test_data import write

from examples.demo.sums import SPECIAL, tokenizer_of
from rl.data.demonstrations import DemonstrationArgs, Demonstrations
from rl.errors import UserError

# As Qwen's: a line break behind each end token
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOKENIZER = tokenizer_of(SPECIAL, "0123456789+=\n", TEMPLATE)
END = TOKENIZER.convert_tokens_to_ids("<|end|>")


def chat(*contents: str) -> list[dict]:
    """The user speaks first, and both take turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def read(tmp_path: Path, *rows: dict, tokenizer=TOKENIZER, ends=(END,), **flags) -> Demonstrations:
    file = str(write(tmp_path / "rows.jsonl", *rows))
    return Demonstrations([file], "train", tokenizer, DemonstrationArgs(**flags), set(ends))


def texts(rows: Demonstrations, index: int) -> tuple[str, list[str]]:
    """All of a row, and its runs of trained tokens."""
    runs, before = [], False
    for token, trained in zip(*rows[index], strict=True):
        if trained:
            runs = [*runs, ""] if not before else runs
            runs[-1] += TOKENIZER.decode([token])
        before = trained
    return TOKENIZER.decode(rows[index].ids), runs


def test_all_answers_of_a_conversation_are_trained_up_to_the_end_token(tmp_path):
    rows = read(tmp_path, {"messages": chat("1+2=", "3", "4+5=", "9\n")}, {"messages": chat("0+0=", "0")})
    text = "<|user|>1+2=<|end|>\n<|assistant|>3<|end|>\n<|user|>4+5=<|end|>\n<|assistant|>9\n<|end|>\n"
    assert texts(rows, 0) == (text, ["3<|end|>", "9\n<|end|>"])
    assert texts(rows, 1)[1] == ["0<|end|>"]


def test_a_prompt_and_its_response_make_a_conversation(tmp_path):
    rows = read(tmp_path, {"question": chat("1+2="), "good": "3"}, prompt_key="question", response_key="good")
    assert texts(rows, 0) == ("<|user|>1+2=<|end|>\n<|assistant|>3<|end|>\n", ["3<|end|>"])


def test_a_string_is_used_as_it_is(tmp_path):
    rows = read(tmp_path, {"prompt": "1+2=", "response": "3"})
    assert texts(rows, 0) == ("1+2=3<|end|>", ["3<|end|>"])


def test_the_demo_gives_the_right_sums():
    tokenizer = tokenizer_of(SPECIAL, "0123456789+=", TEMPLATE.replace("\\n", ""))
    rows = Demonstrations(["demo"], "val", tokenizer, DemonstrationArgs(val_max_samples=20), {END})
    assert len(rows) == 20
    for ids, trained in rows:
        problem, answer = tokenizer.decode(ids, skip_special_tokens=True).split("=")
        assert eval(problem) == int(answer) and tokenizer.decode(ids[trained]) == f"{answer}<|end|>"


def test_longer_conversations_are_left_out_on_demand(tmp_path):
    both = {"messages": chat("1+2=", "3")}, {"messages": chat("1+2=" * 9, "3")}
    assert len(read(tmp_path, *both, max_length=20, filter_overlong_prompts=True)) == 1
    with pytest.raises(UserError, match=r"rows.jsonl row 1: the conversation has 43 tokens, more than --max-length 20"):
        read(tmp_path, *both, max_length=20)


THOUGHTS = TEMPLATE.replace("m['content']", "(m['content'] if loop.last else m['content'].split('=')[-1])")


@pytest.mark.parametrize(
    ("row", "how", "said"),
    [
        ({"text": "1"}, {}, "no column 'messages', nor 'prompt' with 'response'"),
        ({"messages": chat("1+2=")}, {}, "row 0: no message is the assistant's"),
        ({"messages": chat("1+2=", "3")}, {"ends": (0,)}, r"row 0: the chat template ends an answer with .*'<\|pad\|>'"),
        ({"messages": "1+2"}, {}, "row 0: a conversation is a list"),
        ({"messages": [{"role": "assistant"}]}, {}, "row 0: a conversation is a list"),
        ({"prompt": "1+2=", "response": 3}, {}, "row 0: the response is 3, not text"),
        ({"prompt": "", "response": "3"}, {}, "row 0: nothing is in front of the response"),
        (
            {"messages": chat("1", "1+2=3", "4", "5")},
            {"tokenizer": tokenizer_of(SPECIAL, "0123456789+=\n", THOUGHTS)},
            "row 0: the chat template writes message 1 differently if others follow",
        ),
    ],
)
def test_what_cannot_be_learnt_is_refused(tmp_path, row, how, said):
    with pytest.raises(UserError, match=said):
        read(tmp_path, row, **how)
