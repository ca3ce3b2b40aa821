"""The responses of validations: text is read back unchanged, in the run's directory and in the report."""

import html
import json
import re
from pathlib import Path

from test_report import rows as steps
from test_report import write as write_run

from report import Args, main
from rl.record import validations
from tools.report.conclusions import responses
from tools.report.logs import Log, RunGroup


def row(response: str = "5", **more) -> dict:
    return {"prompt": "How many?", "response": response, "ground_truth": "5", "score": 1.0, "more": "left out"} | more


def write(run: Path, step: int, rows: list[dict]) -> Path:
    validations.write_responses(run, step, rows)
    return run / "val_generations" / f"step_{step:06d}.jsonl"


ODD = ["a|b\n`*_[]~$<>&", "<br>\r\n\u2028\x1b[31m", "half of a pair \ud800 é"]


def test_text_comes_back_and_lines_that_were_cut_off_are_left_out(tmp_path):
    file = write(tmp_path, 1, [row(text, score=None) for text in ODD])
    names = ("prompt", "response", "ground_truth", "score")
    expected = [dict(zip(names, ("How many?", text, "5", None), strict=True)) | {"step": 1} for text in ODD]
    assert [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]] == expected
    file.write_bytes(file.read_bytes()[:-20] + b"\n[7]\n\xff")
    _, (_, *table) = responses(RunGroup("a", [Log(tmp_path, {}, [])]))
    assert [line[1] for line in table] == ODD[:2]


def table_cells(page: str) -> list[list[str]]:
    """Return the rows of the page's tables."""
    rows = (re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", page, re.S))
    return [[html.unescape(re.sub("<[^>]+>", "", cell)) for cell in row] for row in rows]


def test_the_report_shows_the_last_responses(tmp_path):
    run = write_run(tmp_path / "run", steps(3))
    write_run(tmp_path / "text", steps(3), lr=1.0)
    write(run, 1, [row("old")])
    odd = "<b>1</b> | \\boxed{5}\n" + "x" * 5000
    write(run, 20, [row("6"), row(odd), row("7")])
    main(Args((str(run), str(tmp_path / "text")), output=str(tmp_path / "out")))
    page = (tmp_path / "out" / "report.html").read_text()
    found = [cells for cells in table_cells(page) if len(cells) == 4 and cells[0] == "How many?"]
    assert [cells[1] for cells in found][::2] == ["6", "7"] and "old" not in page
    assert found[1][1].startswith("<b>1</b> | \\boxed{5}\n") and len(found[1][1]) < 1000
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("Validation responses of ") == 1 and "after step 20" in text
