"""rehearse.py finds the faults of careless graders, and none in those that have none."""

import json

import pytest
from helpers import ROOT, run_script

import rehearse
from rl.errors import UserError
from tools.rehearse import attacks

CARELESS = ROOT / "tests" / "rewards" / "careless.py"
EXPLOITS = {  # by grader: the text that is paid
    "contains": ["all numbers up to 100", "right or wrong", "denied", "inside a longer one", "right, then wrong"],
    "last_number": ["denied", "wrong or right"],
    "any_box": ["all numbers up to 100, in boxes"],
    "form_and_length": ["2,000 words", "all numbers up to 1,000"],
    "evaluates": ["not computed, with +"],
    "keywords": ["keywords"],
}


@pytest.fixture
def data(tmp_path):
    """Sums below 100. The last one's prompt has its answer."""
    file = tmp_path / "sums.jsonl"
    rows = [(f"How much is {a} plus {b}?", a + b) for a, b in ((12, 34), (5, 40), (60, 21), (7, 0))]
    rows = [{"prompt": prompt, "data_source": "sums", "ground_truth": str(truth)} for prompt, truth in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def found(data, grader: str, **more) -> dict[str, rehearse.Found]:
    jobs = []
    for where, row in rehearse.read_rows((str(data),), 4):
        jobs += [(where, text, row) for text in attacks.texts(row["prompt"], row["ground_truth"])]
    return rehearse.judge(jobs, rehearse.score(f"{CARELESS}:{grader}", jobs, "prompt"))


@pytest.mark.parametrize("grader", EXPLOITS)
def test_a_careless_grader_is_cheated(data, grader):
    cheats = {name for name, of in found(data, grader).items() if of.cheats}
    assert cheats >= {*EXPLOITS[grader]}


def test_a_right_answer_is_no_cheat(data):
    of_all = found(data, "contains")
    assert not any(of.cheats for of in of_all.values() if of.kind == attacks.HONEST)
    assert {len(of.scores) for of in of_all.values() if of.kind == attacks.HONEST} == {4}
    prompt = of_all["the prompt"]
    assert [where for _, where, _ in prompt.cheats] == [f"{data} row 3"], "where the prompt has the answer"


def test_a_sound_grader_is_not_cheated(data):
    assert not any(of.cheats for of in found(data, "sound").values())


BUILT_IN = ["openai/gsm8k", "HuggingFaceH4/MATH-500", "math_dapo", "aime_2025", "hiyouga/geometry3k", "demo"]


@pytest.mark.parametrize("source", BUILT_IN)
def test_no_built_in_grader_is_cheated(data, tmp_path, source, capsys):
    file = tmp_path / "rows.jsonl"
    rows = [json.loads(line) | {"data_source": source} for line in data.read_text().splitlines()[:3]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rehearse.main(rehearse.Args(train_files=(str(file),), rows=3)) == 0
    said = capsys.readouterr().out
    assert "no text cheats" in said and "right answers score up to" in said and "STOPS IT" not in said


def test_a_text_that_stops_a_grader_is_named(data):
    jobs = [("row 0", text, {"data_source": "sums", "ground_truth": "46"}) for text in attacks.breakers()]
    jobs = [job for job in jobs if job[1].name in ("a tower of powers", "an exit", "a null character")]
    jobs = [("row 0", attacks.Text("first", attacks.HONEST, "#### 46"), jobs[0][2])] * 20 + jobs  # a first call has more time
    of_all = rehearse.judge(jobs, rehearse.score(f"{CARELESS}:evaluates", jobs, "prompt"))
    assert "timeout" in of_all["a tower of powers"].errors[0] and of_all["an exit"].errors
    assert not of_all["a null character"].errors


def test_another_grader_is_compared(data, capsys):
    graders = {"reward": f"{CARELESS}:contains", "against": f"{CARELESS}:sound"}
    assert rehearse.main(rehearse.Args(train_files=(str(data),), rows=4, **graders)) == 1
    said = capsys.readouterr().out
    assert "have another score by --against" in said and "The shortest text that is paid scores 1: " in said


@pytest.mark.runs
def test_a_recorded_run_gives_data_and_advantages(tmp_path):
    flags = ["--total-training-steps", 1, "--test-freq", 0, "--output-dir", tmp_path, "--experiment-name", "a"]
    run_script("train_sync.py", *flags)
    done = run_script("rehearse.py", "--reward", f"{CARELESS}:contains", "--record", tmp_path / "a", check=False, fresh=True)
    assert (
        done.returncode == 1
        and "rows of demo" in done.stdout
        and "recorded groups, it would have an advantage of" in done.stdout
    )
    with pytest.raises(UserError, match="recorded its samples"):
        rehearse.main(rehearse.Args(record=tmp_path))
