"""The responses of validations: text and pictures are read back unchanged, in the run's directory and in the report."""

import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_report import rows as steps
from test_report import write as write_run

from report import Args, main
from rl.record import validations
from tools.report import responses


def noise(seed: int, width: int = 40, height: int = 30) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def picture(seed: int, *size: int, mode: str = "RGB") -> bytes:
    """An image file."""
    file = io.BytesIO()
    Image.fromarray(noise(seed, *size)).convert(mode).save(file, "PNG")
    return file.getvalue()


def row(response: str = "5", **more) -> dict:
    return {"prompt": "How many?", "response": response, "ground_truth": "5", "score": 1.0, "more": "left out"} | more


def write(run: Path, step: int, rows: list[dict]) -> Path:
    validations.write_responses(run, step, rows)
    return run / "val_generations" / f"step_{step:06d}.jsonl"


ODD = ["a|b\n`*_[]~$<>&", "<br>\r\n\u2028\x1b[31m", "half of a pair \ud800 é"]


def test_text_comes_back_and_lines_that_were_cut_off_are_left_out(tmp_path):
    file = write(tmp_path, 1, [row(text, score=None) for text in ODD])
    names = ("prompt", "response", "ground_truth", "score", "images")
    expected = [dict(zip(names, ("How many?", text, "5", None, []), strict=True)) | {"step": 1} for text in ODD]
    assert [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]] == expected
    file.write_bytes(file.read_bytes()[:-20] + b"\n[7]\n\xff")
    assert [line[1] for line in responses.read(file)[1:]] == ODD[:2]


def test_a_picture_is_kept_once_however_often_it_is_shown(tmp_path):
    a, b = picture(1), picture(2)
    first = write(tmp_path, 1, [row(images=[a]), row("6", images=[a]), row("7", images=[b, a]), row("8")])
    files = {file.name: Image.open(file) for file in (tmp_path / "val_generations").glob("*.png")}
    assert len(files) == 2
    shown = [json.loads(line)["images"] for line in first.read_text().splitlines()]
    assert shown[0] == shown[1] == [shown[2][1]] and len(shown[2]) == 2 and shown[3] == []
    for name, seed in ((shown[0][0], 1), (shown[2][0], 2)):
        assert np.array_equal(np.asarray(files[name]), noise(seed)), "a small one is as it was"
    write(tmp_path, 2, [row(images=[picture(i) for i in range(20)])])
    assert len(json.loads((tmp_path / "val_generations" / "step_000002.jsonl").read_text())["images"]) == 8


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA"])
def test_a_thumbnail_is_small(tmp_path, mode):
    for size in ((2000, 10), (10, 2000), (900, 800), (1, 1)):
        write(tmp_path, 1, [row(images=[picture(0, *size, mode=mode)])])
    for file in (tmp_path / "val_generations").glob("*.png"):
        assert max(Image.open(file).size) <= 160 and file.stat().st_size < 80_000 and Image.open(file).mode == "RGB"


def test_an_image_that_is_damaged_says_so_in_its_place(tmp_path):
    good, bad = picture(1, 300, 300), picture(2, 300, 300)
    shown = json.loads(write(tmp_path, 1, [row(images=[good, bad[: len(bad) // 2]])]).read_text())["images"]
    assert shown[0].endswith(".png") and "cannot be decoded" in shown[1]


def table_cells(page: str) -> list[list[str]]:
    """Return the rows of the page's tables: texts, and the files of pictures as <file>."""
    page = re.sub(r'<img src="([^"]+)"[^>]*>', r"&lt;\1&gt;", page)
    rows = (re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", page, re.S))
    return [[html.unescape(re.sub("<[^>]+>", "", cell)) for cell in row] for row in rows]


def test_the_report_shows_the_last_responses_with_their_pictures(tmp_path):
    run = write_run(tmp_path / "run", steps(3))
    write_run(tmp_path / "text", steps(3), lr=1.0)
    write(run, 1, [row("old", images=[picture(9)])])
    odd = "<b>1</b> | \\boxed{5}\n" + "x" * 5000
    write(run, 20, [row("6", images=[picture(1)]), row(odd, images=[picture(2)]), row("7", images=[picture(1)])])
    main(Args((str(run), str(tmp_path / "text")), output=str(tmp_path / "out")))
    page = (tmp_path / "out" / "report.html").read_text()
    found = [cells for cells in table_cells(page) if len(cells) == 5 and cells[1] == "How many?"]
    assert [cells[2] for cells in found][::2] == ["6", "7"] and "old" not in page
    assert found[1][2].startswith("<b>1</b> | \\boxed{5}\n") and len(found[1][2]) < 1000
    files = [cells[0].strip("<>") for cells in found]
    assert files[0] == files[2] != files[1]
    for file, seed in zip(files, (1, 2, 1), strict=True):
        shown = Image.open(io.BytesIO((tmp_path / "out" / file).read_bytes()))
        assert np.array_equal(np.asarray(shown), noise(seed))
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count(f"]({files[0]})") == 2 and text.count("Validation responses of ") == 1 and "after step 20" in text
    (run / "val_generations" / files[0]).unlink()
    main(Args((str(run),), output=str(tmp_path / "again")))
    page = (tmp_path / "again" / "report.html").read_text()
    assert files[0] not in page and files[1] in page, "a picture that is gone is left out"
