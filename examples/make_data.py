"""Writes the data sets of the recipes as parquet files in verl's layout, with the instruction that the grader expects.

    python examples/make_data.py gsm8k                             # data/gsm8k/{train,test}.parquet, from the hub
    python examples/make_data.py geo3k --out /data/geo3k
    python examples/make_data.py dapo-math                         # dapo-math-17k.parquet and aime-2024.parquet
    python examples/make_data.py gsm8k --source ~/downloads/gsm8k  # without a network: a copy of the hub's repository
    python examples/make_data.py gsm8k --train-files my.jsonl --val-files other.parquet

A row has data_source, prompt (one chat message), images if there are any, ability, reward_model and extra_info (split, index,
answer, question). Rows that are already in verl's layout, such as DAPO-Math-17k's, are not changed, but each of its training
rows, which its authors repeat about a hundred times, is kept only once.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq

from rl import images
from rl.data.files import read_table
from rl.data.tables import Rows
from rl.errors import UserError
from rl.printable import printable
from rl.rewards.score import format_of

FILES = {".parquet", ".jsonl", ".json"}


@dataclass(frozen=True)
class DataSet:
    """A data set on the hub."""

    data_source: str  # chooses the grader
    hub: dict[str, tuple[str, str | None, str]]  # train or val -> (name, configuration, split)
    out: dict[str, str]  # train or val -> the file that is written
    question: tuple[str, ...]  # columns that may have the problem
    answer: tuple[str, ...]  # columns that may have the answer
    truth: Callable[[str], str | None] = str.strip  # answer -> ground truth, or None if there is none


def after_hashes(answer: str) -> str | None:
    """Return the ground truth of a GSM8K answer: the number after "####"."""
    found = re.search(r"#### (-?[0-9.,]+)", answer)
    return found and found[1].replace(",", "")


DATA = {
    "gsm8k": DataSet(
        "openai/gsm8k",
        {"train": ("openai/gsm8k", "main", "train"), "val": ("openai/gsm8k", "main", "test")},
        {"train": "train.parquet", "val": "test.parquet"},
        ("question", "prompt"),
        ("answer", "reward_model"),
        after_hashes,
    ),
    "geo3k": DataSet(
        "hiyouga/geometry3k",
        {"train": ("hiyouga/geometry3k", None, "train"), "val": ("hiyouga/geometry3k", None, "test")},
        {"train": "train.parquet", "val": "test.parquet"},
        ("problem", "question", "prompt"),
        ("answer", "reward_model"),
    ),
    "dapo-math": DataSet(
        "math_dapo",
        {"train": ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"), "val": ("BytedTsinghua-SIA/AIME-2024", None, "train")},
        {"train": "dapo-math-17k.parquet", "val": "aime-2024.parquet"},
        ("prompt", "problem", "question", "Problem"),
        ("answer", "solution", "Answer", "reward_model"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=DATA)
    parser.add_argument("--out", type=Path, help="directory to write to; by default data/<name>")
    parser.add_argument("--source", type=Path, help="a local copy of the hub's repository, for both files")
    parser.add_argument(
        "--train-files", nargs="+", type=Path, default=[], help="parquet, json or jsonl files in the hub's layout"
    )
    parser.add_argument("--val-files", nargs="+", type=Path, default=[], help="the same for the validation")
    args = parser.parse_args()
    try:
        for which in ("train", "val"):
            print(printable(make(args.name, which, args)))
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(1)


def make(name: str, which: str, args: argparse.Namespace) -> str:
    """Write one of the two files, and return a line about it. Raise UserError if that is impossible."""
    data, target = DATA[name], (args.out or Path("data", name)) / DATA[name].out[which]
    files = getattr(args, f"{which}_files") or (local_files(args.source, data.hub[which]) if args.source else [])
    if not files and (args.train_files or args.val_files):
        return f"{target}: not written, because --{which}-files names no file"
    tables = [(str(file), file.parent, read_table(str(file), which)) for file in files] or [from_hub(data.hub[which])]
    rows, repeated = [], 0
    seen: set[str] = set()
    for where, directory, table in tables:
        for row in converted(data, which, where, directory, table):
            key = repr((row["prompt"], row["reward_model"]))
            if name == "dapo-math" and which == "train" and key in seen:
                repeated += 1
                continue
            seen.add(key)
            row["extra_info"].setdefault("index", len(rows))
            rows.append(row)
    write(target, rows)
    return f"{target}: {len(rows):,} rows" + (f", {repeated:,} repetitions left out" if repeated else "")


def write(target: Path, rows: list[dict]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        pq.write_table(pa.Table.from_pylist(rows), partial)
        partial.replace(target)
    except OSError as error:
        raise UserError(
            f"{target}: it cannot be written ({error.strerror or error}). Choose another directory with --out."
        ) from None


def from_hub(of: tuple[str, str | None, str]) -> tuple[str, Path, Rows]:
    from datasets import load_dataset

    name, configuration, split = of
    try:
        return name, Path(), Rows(load_dataset(name, configuration, split=split).data.table)
    except Exception as error:  # no network, no such name: datasets and hub have many exceptions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{name}: it cannot be loaded from the hub here ({reason}). Download it elsewhere, and give its directory with "
            "--source, or its files with --train-files and --val-files."
        ) from None


def local_files(source: Path, of: tuple[str, str | None, str]) -> list[Path]:
    """Return the split's files in a copy of the hub's repository, or in a directory of such copies."""
    name, configuration, split = of
    repository = next((path for path in (source / name, source / Path(name).name) if path.is_dir()), source)
    found = sorted(path for path in repository.rglob("*") if path.suffix in FILES and path.is_file())
    found = [path for path in found if configuration in path.relative_to(repository).parts] or found
    of_split = [path for path in found if re.match(rf"{split}\b|{split}_", path.stem)]
    if not of_split and len(found) == 1 and repository != source:
        of_split = found  # a repository with a single file, whatever its name
    if not of_split:
        raise UserError(
            f"--source {source}: no .parquet, .json or .jsonl file there begins with {split!r}. Name the files with "
            "--train-files and --val-files."
        )
    return of_split


def converted(data: DataSet, which: str, where: str, directory: Path, table) -> Iterator[dict]:
    """Yield the rows in verl's layout. Raise UserError, naming the row, if one cannot be converted."""
    names = {key: _column(where, table, getattr(data, key)) for key in ("question", "answer")}
    split = {"train": "train", "val": "test"}[which]
    for number, row in enumerate(table):
        at = f"{where} row {number}"
        is_done = isinstance(row.get("prompt"), list) and "reward_model" in row
        yield _as_it_is(data, at, row) if is_done else _converted(data, split, at, directory, row, names)


def _column(where: str, table, choices: tuple[str, ...]) -> str:
    found = next((name for name in choices if name in table.column_names), None)
    if found is None:
        has = ", ".join(table.column_names)
        raise UserError(f"{where}: there is no column {' or '.join(map(repr, choices))}; the columns are {has}.")
    return found


def _as_it_is(data: DataSet, at: str, row: dict) -> dict:
    truth = (row["reward_model"] or {}).get("ground_truth")
    if not row.get("prompt") or truth is None or not str(truth).strip():
        raise UserError(f"{at}: prompt or reward_model.ground_truth is empty. Remove the row.")
    return {"data_source": data.data_source, **row, "extra_info": dict(row.get("extra_info") or {})}


def _converted(data: DataSet, split: str, at: str, directory: Path, row: dict, names: dict[str, str]) -> dict:
    question, answer = (row[names[key]] for key in ("question", "answer"))
    if isinstance(answer, dict):
        answer = answer.get("ground_truth")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{at}: column {names['question']!r} is no text, or empty. Remove the row.")
    truth = data.truth(str(answer)) if answer is not None else None
    if not truth:
        form = " with '#### NUMBER' in it" if data.truth is after_hashes else ""
        raise UserError(f"{at}: column {names['answer']!r} has no answer{form}. Correct the row, or remove it.")
    out = {
        "data_source": data.data_source,
        "prompt": [{"role": "user", "content": format_of(data.data_source).prompt(question)}],
    }
    if row.get("images") is not None:
        out["images"] = _images(at, directory, row["images"], question)
    return out | {
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": int(at.rpartition(" ")[2]), "answer": str(answer), "question": question},
    }


def _images(at: str, directory: Path, given: Any, question: str) -> list[dict]:
    """Return the images as bytes, with their original names."""
    given = given if isinstance(given, list) else [given]
    if question.count(images.PLACE) != len(given):
        raise UserError(f"{at}: {len(given)} images, and {question.count(images.PLACE)} times {images.PLACE} in the problem.")
    try:
        files = images.files_of(given, directory)
    except images.ImageError as error:
        raise UserError(f"{at}: {error}. Correct the row, or remove it.") from None
    paths = [one.get("path") if isinstance(one, dict) else one if isinstance(one, str) else None for one in given]
    return [{"bytes": data, "path": path and Path(path).name} for data, path in zip(files, paths, strict=True)]


if __name__ == "__main__":
    main()
