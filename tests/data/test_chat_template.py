"""--chat-template-args and --system-prompt: each template renders what it renders with the argument, or with the message."""

import re

import pytest
from families import FAMILIES, OTHERS, tokenizer_of
from helpers import run_script
from test_turns import SCHEMA

from rl.data.chat_template import with_defaults
from rl.errors import UserError

USER = {"role": "user", "content": "How much is 12 plus 34?"}
SAID = [USER, {"role": "assistant", "content": "46"}, {"role": "user", "content": "{{ And }} {% 5 %}\n more?\n"}]
CONVERSATIONS = {"one turn": [USER], "three turns": SAID, "its own system": [{"role": "system", "content": "Be brief."}, *SAID]}
REFUSES = {"gemma"}
SYSTEMS = ["You add numbers.", 'It\'s "quoted", {{ braces }}, {% blocks %}, 中文 😀\nand a \\n line.\n']


def rendered(tokenizer, messages, **more) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)


@pytest.mark.parametrize("family", FAMILIES | OTHERS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_prompt_is_as_if_each_conversation_began_with_it(family, system):
    plain = tokenizer_of(family)
    try:
        changed = with_defaults(plain, [], system)
    except UserError as error:
        assert family in REFUSES, error
        return
    assert family not in REFUSES
    for messages in CONVERSATIONS.values():
        own = messages[0]["role"] == "system"
        expected = messages if own else [{"role": "system", "content": system}, *messages]
        try:
            text = rendered(plain, expected)
        except Exception as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                rendered(changed, messages)
        else:
            assert rendered(changed, messages) == text
    assert messages == CONVERSATIONS["its own system"], "no message is changed"


THINKING = [family for family in FAMILIES | OTHERS if "enable_thinking" in tokenizer_of(family).chat_template]


@pytest.mark.parametrize("family", THINKING)
@pytest.mark.parametrize("value", [True, False])
def test_an_argument_is_a_default(family, value):
    plain = tokenizer_of(family)
    spelled = str(value) if family == "qwen3" else str(value).lower()  # Python's spelling, and JSON's
    changed = with_defaults(plain, [f"enable_thinking={spelled}"], None)
    for messages in CONVERSATIONS.values():
        assert rendered(changed, messages) == rendered(plain, messages, enable_thinking=value)
        other = rendered(plain, messages, enable_thinking=not value)
        assert rendered(changed, messages, enable_thinking=not value) == other, "what a caller gives goes first"
        assert rendered(changed, messages, tools=[SCHEMA]) == rendered(plain, messages, tools=[SCHEMA], enable_thinking=value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("low", "low"),
        ('"3"', "3"),
        ("null", None),
        ("NaN", "NaN"),
        ("1e999", "1e999"),
        ("None", None),
        ("[1, true]", [1, True]),
        ('{"a": "%}"}', {"a": "%}"}),
        ("a=b '\"", "a=b '\""),
    ],
)
def test_values_are_json_or_text(text, value):
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = "\n{{ effort }} {{ effort is none }} {{ messages[0].content }}"
    expected = rendered(tokenizer, [USER], effort=value)
    tokenizer = with_defaults(tokenizer, [f"effort={text}"], None)
    assert rendered(tokenizer, [USER]) == expected


def test_a_template_that_shows_no_system_message_is_named():
    tokenizer = tokenizer_of("qwen3")
    for template, message in (
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "drops system messages"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
            "refuses system messages .*no system",
        ),
    ):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=message):
            with_defaults(tokenizer, [], "Be brief.")


@pytest.mark.parametrize(
    ("template", "words", "message"),
    [
        ("{{ x }}", ["enable_thinking"], "give name=value"),
        ("{{ x }}", ["a b=1"], "give name=value"),
        ("{{ tools }}", ["tools=[]"], "its own arguments"),
        ("{{ enable_thinking }}", ["enable_thinkin=false"], "does not mention enable_thinkin"),
        (None, ["x=1"], "no chat template"),
        ({"default": "{{ x }}", "tool_use": "{{ x }}"}, ["x=1"], "several chat templates"),
    ],
)
def test_what_cannot_be_set_is_named(template, words, message):
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        with_defaults(tokenizer, words, None)


@pytest.mark.runs
def test_a_run_uses_and_exports_them(demo_model, tmp_path):
    """In training, in validation and in the checkpoint. Another system prompt is another run."""
    flags = ["--system-prompt", "12+34=", "--total-training-steps", 1, "--output-dir", tmp_path, "--experiment-name", "run"]
    run_script("train_sync.py", *flags, "--max-prompt-length", 80)
    rows = tmp_path / "rows.jsonl"
    run_script("view.py", tmp_path / "run", "--jsonl", rows)
    assert "12+34=" in rows.read_text().splitlines()[0]
    (validated, *_) = sorted((tmp_path / "run" / "val_generations").iterdir())
    assert "12+34=" in validated.read_text().splitlines()[0]
    assert "12+34=" in (tmp_path / "run" / "step_000001" / "chat_template.jinja").read_text()
    flags[1] = "12+35="
    done = run_script("train_sync.py", *flags, "--max-prompt-length", 80, "--total-training-steps", 2, check=False)
    assert done.returncode == 1 and "--system-prompt" in done.stderr
