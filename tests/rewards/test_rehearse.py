"""rehearse.py finds the faults of careless graders, and none in those that have none."""

import json
import re

import pytest
from helpers import ROOT, run_script
from test_data import write

import rehearse
import view
from rl.errors import UserError
from tools.rehearse import attacks

CARELESS = ROOT / "tests" / "rewards" / "careless.py"
EXPLOITS = {  # by grader: the text that is paid
    "contains": ["all numbers up to 100", "right or wrong", "denied", "inside a longer one", "right, then wrong"],
    "share": ["with a digit more"],
    "last_number": ["denied", "wrong or right"],
    "any_box": ["all numbers up to 100, in boxes"],
    "form_and_length": ["2,000 words", "all numbers up to 1,000"],
    "evaluates": ["not computed, with +"],
    "keywords": ["keywords"],
}
OF_TRL = '''
class Notes:
    def reset(self, **row):
        self.notes = [row["data_source"]]

    def keep(self, note: str):
        """Keeps a note.

        Args:
            note: What to keep.
        """
        self.notes.append(note)


def contains(completions, ground_truth, **kwargs):
    return [float(truth in said[-1]["content"]) for said, truth in zip(completions, ground_truth)]


def kept(environments, **kwargs):
    return [0.5 * (env.notes == ["sums"]) for env in environments]
'''


@pytest.fixture
def data(tmp_path):
    """Sums below 100. The last one's prompt has its answer."""
    rows = [(f"How much is {a} plus {b}?", a + b) for a, b in ((12, 34), (5, 40), (60, 21), (7, 0))]
    rows = [{"prompt": prompt, "data_source": "sums", "ground_truth": str(truth)} for prompt, truth in rows]
    return write(tmp_path / "sums.jsonl", *rows)


def texts_of(data) -> list[rehearse.Try]:
    args = rehearse.Args(train_files=(str(data),), rows=4)
    return [text for where, row in rehearse.read_rows(args, ()) for text in rehearse.texts_of(where, row)]


def score(texts: list[rehearse.Try], grader: str) -> list:
    return rehearse.score(rehearse.Args(), f"{CARELESS}:{grader}", texts)


def found(data, grader: str) -> list[rehearse.Try]:
    texts = texts_of(data)
    return [text for _, text in rehearse.cheats(texts, score(texts, grader))]


@pytest.mark.parametrize("grader", EXPLOITS)
def test_a_careless_grader_is_cheated(data, grader):
    assert {text.name for text in found(data, grader)} >= {*EXPLOITS[grader]}


def test_a_right_answer_is_no_cheat(data):
    cheats = found(data, "contains")
    assert not any(text.kind == rehearse.HONEST for text in cheats)
    assert sum(text.kind == rehearse.HONEST for text in texts_of(data)) == 4 * len(attacks.FORMS)
    assert [text.where for text in cheats if text.name == "the prompt"] == [f"{data} row 3"], "where the prompt has the answer"


def test_a_sound_grader_is_not_cheated(data):
    assert not found(data, "sound")


BUILT_IN = ["openai/gsm8k", "HuggingFaceH4/MATH-500", "math_dapo", "aime_2025", "hiyouga/geometry3k", "demo"]


@pytest.mark.parametrize("source", BUILT_IN)
def test_no_built_in_grader_is_cheated(data, tmp_path, source, capsys):
    rows = [json.loads(line) | {"data_source": source} for line in data.read_text().splitlines()[:3]]
    file = write(tmp_path / "rows.jsonl", *rows)
    assert rehearse.main(rehearse.Args(train_files=(str(file),), rows=3)) == 0
    said = capsys.readouterr().out
    assert "no text cheats" in said and "right answers score up to" in said and "STOPS IT" not in said


def test_a_text_that_stops_a_grader_is_named(capsys):
    row = {"data_source": "sums", "ground_truth": "46", "prompt": ""}
    names = ("a tower of powers", "an exit", "a null character")
    texts = [rehearse.Try("row 0", row, rehearse.HONEST, "first", "#### 46")] * 20  # a first call has more time
    texts += [rehearse.Try("row 0", row, rehearse.BREAKER, name, attacks.BREAKERS[name]) for name in names]
    rehearse.show(texts, score(texts, "evaluates"), [])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("STOPS IT")]
    assert len(lines) == 2 and "a tower of powers: timeout" in lines[0] and "an exit: " in lines[1]


def test_another_grader_is_compared(data, capsys):
    graders = {"reward": f"{CARELESS}:contains", "against": f"{CARELESS}:sound"}
    assert rehearse.main(rehearse.Args(train_files=(str(data),), rows=4, **graders)) == 1
    said = capsys.readouterr().out
    assert "texts: another score by --against" in said and "The shortest text that is paid scores 1: " in said


@pytest.mark.runs
def test_a_recorded_run_gives_data_and_advantages(tmp_path):
    run_script(
        "train_sync.py", "--total-training-steps", 1, "--test-freq", 0, "--output-dir", tmp_path, "--experiment-name", "a"
    )
    flags = ("--reward", f"{CARELESS}:contains", "--record", tmp_path / "a")
    done = run_script("rehearse.py", *flags, check=False, fresh=True)
    assert done.returncode == 1 and "texts for 8 rows of demo" in done.stdout
    assert "recorded groups, it would have an advantage of" in done.stdout
    same = run_script("rehearse.py", "--record", tmp_path / "a", fresh=True)
    assert "0 of 64 recorded responses: another score in the run" in same.stdout, "by the run's own grader"
    differ = re.search(r"(\d+) of 64 recorded responses: another score", done.stdout)
    rows = [row for row in view.read(tmp_path / "a") if not row["score"]]
    assert int(differ[1]) == sum(row["ground_truth"] in row["response"] for row in rows)
    with pytest.raises(UserError, match="recorded its samples"):
        rehearse.main(rehearse.Args(record=tmp_path))


@pytest.mark.runs
def test_an_environment_is_cheated_and_stopped(data, capsys):
    """Each text is the model's turn, again and again until the environment has enough."""
    assert rehearse.main(rehearse.Args(env=f"{CARELESS}:Game", train_files=(str(data),), rows=2)) == 1
    said = capsys.readouterr().out
    for name in ("denied", "right or wrong", "inside a longer one", "all numbers up to 100"):
        assert f"CHEATS   {name}, in 2 rows, up to 1:" in said, "in the first turn"
    stopped = [line for line in said.splitlines() if line.startswith("STOPS IT")]
    assert len(stopped) == 2 and "a tower of powers: timeout" in stopped[0] and "an exit: " in stopped[1]


@pytest.mark.runs
def test_a_reward_function_of_trl_is_cheated_in_its_environment(data, tmp_path, capsys):
    """It gets the environment that the texts were said in, and what they were, as in training."""
    (tmp_path / "script.py").write_text(OF_TRL)
    env, reward = f"{tmp_path / 'script.py'}:Notes", f"{tmp_path / 'script.py'}:contains,kept"
    assert rehearse.main(rehearse.Args(env=env, reward=reward, train_files=(str(data),), rows=2)) == 1
    said = capsys.readouterr().out
    assert "right answers score up to 1.5" in said and "CHEATS   denied, in 2 rows, up to 1.5:" in said


@pytest.mark.runs
def test_recorded_episodes_are_played_again(tmp_path):
    """Turn by turn, with the seeds of the run: tools answer as they did, and the grader scores the last turn."""
    flags = ("--model", "demo-calculator", "--env", "demo-calculator", "--max-response-length", 24, "--test-freq", 0)
    run_script("train_sync.py", *flags, "--total-training-steps", 1, "--output-dir", tmp_path, "--experiment-name", "a")
    rows = [*view.read(tmp_path / "a")]
    assert any(row["turns"] > 1 for row in rows), "some call the tool"
    flags = ("--env", "demo-calculator", "--record", tmp_path / "a", "--rows", 1)
    done = run_script("rehearse.py", *flags, check=False, fresh=True)
    assert f"0 of {len(rows)} recorded responses: another score in the run" in done.stdout, done.stdout + done.stderr
