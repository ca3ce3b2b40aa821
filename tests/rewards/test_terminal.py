"""Text from a model or a user's function reaches no terminal with control characters."""

import pytest
from test_scoring import drain, make_pool, submit

from rl import printable
from rl.errors import UserError

pytestmark = pytest.mark.timeout(200)

RAW = "bad \x1b]0;title\x07\x1b[2J \r\x08\x7f\x9b31m\u202e end\nof it"


def test_control_characters_are_written_out():
    text = printable.one_line(RAW)
    assert text == r"bad \x1b]0;title\x07\x1b[2J  \x08\x7f\x9b31m\u202e end of it"
    assert printable.printable("a\tb\nc\x1b") == "a\tb\nc\\x1b" and printable.printable("für 10 € ✓ 数") == "für 10 € ✓ 数"


def test_the_console_and_error_messages_write_control_characters_out(capsys, monkeypatch):
    from rl.ranks import process, stops
    from rl.record.run import ConsoleLog

    ConsoleLog(10).say(RAW)
    said = capsys.readouterr().out
    monkeypatch.setattr(process.os, "_exit", lambda code: None)
    monkeypatch.setattr(stops, "record", lambda _: (True, True))
    process.fail(UserError(RAW))
    for text in (said, capsys.readouterr().err):
        assert "title" in text and text.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "act", ["raise ValueError(text)", "return text", "return {'score': text}", "sys.exit(text)", "raise E(text)"]
)
def test_what_a_function_says_reaches_no_terminal_raw(act, tmp_path):
    (tmp_path / "mine.py").write_text(
        f"import sys\nclass E(Exception): pass\ndef score(solution_str, **_):\n    text = solution_str\n    {act}\n"
    )
    with make_pool(f"{tmp_path / 'mine.py'}:score") as pool:
        submit(pool, RAW)
        score = drain(pool)[0]
        assert score.event and score.message.isprintable() and "title" in score.message
        assert all(text.isprintable() for text in pool.last_message.values())
