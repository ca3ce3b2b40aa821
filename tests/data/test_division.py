"""All ranks of a role share the reading of prompts, and every rank ends up with the same prompts as a single rank."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import run_script

from examples.demo.sums import build_tokenizer

NUMBERS = [f"{i}+{i % 7}=" for i in range(50)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    """A model's directory without weights: a tokenizer of one token a character."""
    path = tmp_path_factory.mktemp("texts")
    build_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    return str(path)


def write(path: Path, prompts: list[str]) -> str:
    table = {"prompt": prompts, "ground_truth": ["1"] * len(prompts), "data_source": ["demo"] * len(prompts)}
    Dataset.from_dict(table).to_parquet(path)
    return str(path)


def read(model: str, out: Path, ranks: int | None, **flags) -> list[dict]:
    """Return the prompts that each rank has read."""
    out.mkdir()
    run_script("tests/programs/read_prompts.py", model, out, json.dumps(flags), ranks=ranks)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks or 1)]


def result(read: dict) -> dict:
    return {name: value for name, value in read.items() if name not in ("texts", "images")}


@pytest.mark.runs
@pytest.mark.parametrize(("ranks", "generators"), [(2, 0), (3, 2)])
def test_each_rank_measures_a_part_and_has_all_rows(texts, tmp_path, ranks, generators):
    """Some prompts are left out, and a part lies in two files. Learners and generators divide the work among themselves."""
    files = [write(tmp_path / "a.parquet", NUMBERS[:10]), write(tmp_path / "b.parquet", [*NUMBERS[10:], "1" * 9, "2" * 20])]
    flags = {"train_files": files, "max_prompt_length": 8, "filter_overlong_prompts": True}
    (alone,) = read(texts, tmp_path / "alone", None, **flags)
    together = read(texts, tmp_path / "together", ranks, generators=generators, **flags)
    assert alone["texts"] == 52 and alone["rows"] == list(range(50))
    assert [result(of_rank) for of_rank in together] == [result(alone)] * ranks
    assert [of_rank["texts"] for of_rank in together] == ([52, 26, 26] if generators else [26, 26])


BAD = [
    ({4: "1" * 30}, "a.parquet row 4: the prompt has 30 tokens"),
    ({46: "1" * 30}, "a.parquet row 46: the prompt has 30 tokens"),
    ({46: "1" * 30, 30: ""}, "a.parquet row 30: the prompt (column 'prompt', --prompt-key) is empty"),
]


@pytest.mark.runs
@pytest.mark.parametrize(("rows", "said"), BAD)
def test_an_error_is_the_one_that_a_rank_alone_finds(texts, tmp_path, rows, said):
    prompts = [rows.get(i, prompt) for i, prompt in enumerate(NUMBERS)]
    flags = {"train_files": [write(tmp_path / "a.parquet", prompts)], "max_prompt_length": 20}
    (alone,) = read(texts, tmp_path / "alone", None, **flags)
    assert said in alone["error"]
    assert [result(of_rank) for of_rank in read(texts, tmp_path / "together", 2, **flags)] == [result(alone)] * 2
