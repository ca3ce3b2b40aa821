"""examples/make_data.py converts rows in the hub's layout to verl's, with what the grader needs. A warning names prompts that
do not ask for the answer's form."""

import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import train
from test_data import dataset, write

from examples import make_data
from math_grader import graders
from math_grader.graders import FORMATS
from rl.rewards.score import LOOKED_AT, unasked

GSM8K = [
    {"question": "Ann has 3 pens and buys 1,999 more. How many?", "answer": "3 + 1,999 = <<3+1999=2002>>2,002\n#### 2,002"},
    {"question": "It is 2 degrees, and falls by 7.", "answer": "2 - 7 = -5\n#### -5"},
]


@pytest.fixture
def made(capsys, monkeypatch):
    """Return a function that returns the output of make_data.py, or its errors if it exits with a code."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the environment was read when these were imported
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    def make(*words, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["make_data.py", *map(str, words)])
        ended = 0
        try:
            make_data.main()
        except SystemExit as end:
            ended = end.code
        said = capsys.readouterr()
        assert ended == code, said.err
        return said.err if code else said.out

    return make


@pytest.mark.slow
def test_it_makes_gsm8k_as_verl_has_it(made, gsm8k, tmp_path):
    """The raw rows, taken out of verl's files, give these files again."""
    for split in ("train", "test"):
        rows = pq.read_table(gsm8k / f"{split}.parquet").to_pylist()
        write(tmp_path / f"{split}.jsonl", *[{key: row["extra_info"][key] for key in ("question", "answer")} for row in rows])
    made("gsm8k", "--train-files", tmp_path / "train.jsonl", "--val-files", tmp_path / "test.jsonl", "--out", tmp_path)
    for split in ("train", "test"):
        made_table, verls = (pq.read_table(at / f"{split}.parquet") for at in (tmp_path, gsm8k))
        assert made_table.schema.equals(verls.schema, check_metadata=False)
        assert made_table.to_pylist() == verls.to_pylist()


@pytest.mark.slow
def test_it_makes_geo3k_as_verl_has_it(made, gsm8k, tmp_path):
    file = gsm8k.parent / "geo3k" / "train.parquet"
    if not file.exists():
        pytest.skip(f"no {file}")
    verls = pq.read_table(file).to_pylist()
    raw = [{"images": r["images"], "problem": r["extra_info"]["question"], "answer": r["extra_info"]["answer"]} for r in verls]
    pq.write_table(pa.Table.from_pylist(raw), tmp_path / "raw.parquet")
    made("geo3k", "--train-files", tmp_path / "raw.parquet", "--out", tmp_path)
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    for number, row in enumerate(verls):  # verl's file is a choice of rows, with their numbers in the whole
        row["extra_info"]["index"] = number
    assert rows == verls


def test_dapos_rows_stay_as_they_are_once_each(made, tmp_path):
    row = {
        "data_source": "math_dapo", "prompt": [{"role": "user", "content": "Solve it. Answer: $Answer"}], "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b"},
    }  # fmt: skip
    other = row | {"prompt": [{"role": "user", "content": "Solve that. Answer: $Answer"}]}
    files = [write(tmp_path / f"{name}.jsonl", row, other, row) for name in ("dapo", "aime")]
    said = made("dapo-math", "--train-files", files[0], "--val-files", files[1], "--out", tmp_path)
    assert "2 rows, 1 repetitions left out" in said
    assert pq.read_table(tmp_path / "dapo-math-17k.parquet").to_pylist() == [row, other]
    assert pq.read_table(tmp_path / "aime-2024.parquet").to_pylist() == [row, other, row], "a validation may ask 32 times"


def test_plain_problems_become_dapos(made, tmp_path):
    rows = [{"prompt": "What is 1+1?", "solution": "2", "reward_model": {"ground_truth": "2", "style": "rule"}}]
    made("dapo-math", "--train-files", write(tmp_path / "x.jsonl", *rows), "--out", tmp_path)
    (row,) = pq.read_table(tmp_path / "dapo-math-17k.parquet").to_pylist()
    (message,) = row["prompt"]
    assert message["content"].startswith("Solve the following math problem") and "\n\nWhat is 1+1?\n\n" in message["content"]
    assert (row["reward_model"]["ground_truth"], row["data_source"]) == ("2", "math_dapo")


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("gsm8k", [GSM8K[0], {"question": "1+1?", "answer": "2"}], "row 1: column 'answer' has no answer with '#### NUMBER'"),
        ("gsm8k", [{"question": " ", "answer": "#### 2"}], "x.jsonl row 0: column 'question' is no text, or empty"),
        ("gsm8k", [{"q": "1+1?", "answer": "#### 2"}], "there is no column 'question'"),
        ("geo3k", [{"problem": "<image>x", "answer": "2", "images": ["gone.png"]}], "row 0: image 0 cannot be read"),
        ("geo3k", [{"problem": "x", "answer": "2", "images": ["gone.png"]}], "1 images, and 0 times <image>"),
        ("dapo-math", [{"prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": ""}}], "truth is empty"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_are_named(made, name, rows, words, tmp_path):
    said = made(name, "--train-files", write(tmp_path / "x.jsonl", *rows), "--out", tmp_path, code=1)
    assert said.startswith("error: ") and words in said and said.count("\n") == 1
    assert not list(tmp_path.glob("*.parquet"))


# ------------------------------------------------------------------------------------------------ prompts that never ask


RIGHT = {  # a response as each instruction asks for it -> the grader that must find the answer 2 in it
    "gsm8k": "one and one\n#### 2",
    "math_verify": "one and one: \\boxed{2}",
    "math_dapo": "one and one\nAnswer: 2",
    "geo3k": "<think>one and one</think> \\boxed{2}",
}


@pytest.mark.parametrize("grader", FORMATS)
def test_an_instruction_asks_for_what_its_grader_finds(grader):
    score = getattr(graders, grader)("x", RIGHT[grader], "2")
    assert (score["score"] if isinstance(score, dict) else score) == 1
    wanted = FORMATS[grader]
    assert any(mark in wanted.prompt("?") and mark in RIGHT[grader] for mark in wanted.marks)


@pytest.mark.parametrize("source", ["openai/gsm8k", "lighteval/MATH", "math_dapo", "aime24", "hiyouga/geometry3k"])
def test_prompts_that_never_ask_are_named(source, tmp_path):
    plain = write(tmp_path / "x.jsonl", *[{"question": "1+1=", "answer": "#### 2", "data_source": source}] * 3)
    (warning,) = unasked(dataset(plain))
    assert f"none of the first 3 prompts of '{source}' asks for" in warning and "make_data.py" in warning


def test_prompts_that_ask_and_graders_that_take_all_are_not():
    prompt = lambda source, text: SimpleNamespace(data_source=source, text=text)  # noqa: E731
    asked, plain = prompt("gsm8k", "1+1? The answer after ####"), prompt("gsm8k", "1+1?")
    others = [prompt(name, "1+1?") for name in ("demo", "my_own", "gsm8k_flexible")]
    assert unasked([plain, asked, *others]) == [], "one that asks is enough: few-shot prompts differ"
    assert len(unasked([plain, prompt("gsm8k", "2+2?"), *others])) == 1
    assert unasked([others[0]] * LOOKED_AT + [plain]) == [], "only the first rows are looked at"


@pytest.mark.runs
def test_a_run_warns_of_them_before_its_first_step(tmp_path):
    """A run with a user's own reward function does not warn, because the function may look for anything."""
    plain = write(tmp_path / "x.jsonl", *[{"question": "1+1=", "answer": "#### 2"}] * 4)
    (tmp_path / "mine.py").write_text("def score(*_, **__):\n    return 1.0\n")
    flags = ["--train-files", plain, "--test-freq", "0", "--total-training-steps", "1", "--train-batch-size", "2"]
    for own in ((), ("--reward", f"{tmp_path}/mine.py:score")):
        _, _, done = train("train_sync.py", *flags, *own, out=tmp_path / f"out{len(own)}")
        warned = "warning: none of the first 4 prompts of 'openai/gsm8k' asks for ####" in done.stdout
        assert warned == (not own)
