"""The tables of validation responses, val_generations/step_<step>.md of a run: written as it runs, read by report.py.

Pictures of a prompt are thumbnails: PNG files next to the table. Text is escaped, so that neither Markdown nor a terminal
changes it. Needs no torch.
"""

import io
import re
from pathlib import Path
from typing import NamedTuple

import xxhash

from rl.errors import ImageError
from rl.printable import escaped
from rl.record.files import Files

DIRECTORY = "val_generations"
COLUMNS = ("prompt", "response", "ground_truth", "score")
SIDE = 160  # most pixels of a thumbnail's side: at most 77 KB of PNG
MOST = 8  # pictures shown per prompt


class Picture(NamedTuple):
    file: str  # its name, in the directory of the table that shows it
    words: str


def write(files: Files, step: int, rows: list[dict]) -> None:
    """Write the table. rows: one per response, with COLUMNS and optionally "images", the bytes of image files."""
    with_pictures = any(row.get("images") for row in rows)
    columns = ("picture",) * with_pictures + COLUMNS
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for row in rows:
        shown = [_thumbnail(files, source) for source in row.get("images", ())[:MOST]]
        cells = [" ".join(map(markdown, shown))] * with_pictures + [markdown(row[column]) for column in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    # a decoded response may hold half a character
    files.replace(f"{DIRECTORY}/step_{step:06d}.md", text.encode(errors="backslashreplace"))


def _thumbnail(files: Files, source: bytes) -> Picture | str:
    """Write the image's thumbnail, unless it exists, and return it. Return the error of an image that cannot be read."""
    from PIL import Image

    from rl.data.images import to_rgb

    try:
        image = Image.fromarray(to_rgb(source))
    except ImageError as error:
        return str(error)
    size = f"{image.width} x {image.height}"
    png = io.BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(png, "PNG")
    file = f"{xxhash.xxh3_64_hexdigest(png.getvalue())}.png"
    if not (files.directory / DIRECTORY / file).exists():
        files.replace(f"{DIRECTORY}/{file}", png.getvalue())
    return Picture(file, size)


def markdown(value) -> str:
    """Return the value as a table's cell: numbers with three decimals, None as "unscored", text on one line."""
    if isinstance(value, Picture):
        return f"![{value.words}]({value.file})"
    text = "unscored" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    text = re.sub(r"([\\`*_\[\]|~$<>&])", r"\\\1", text)
    text = re.sub(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", "<br>", text)
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: "\\" + escaped(match[0]), text)


def read(table: Path) -> list[list]:
    """Return the rows of a table of `write`, its header first: texts, and lists of pictures. Damaged lines are left out."""
    lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [[_value(cell[1:-1]) for cell in re.findall(r"((?:\\.|[^\\|])*)\|", line)[1:]] for line in lines]
    if not rows or tuple(rows[0][-len(COLUMNS) :]) != COLUMNS:
        return []
    return [row for row in rows[:1] + rows[2:] if len(row) == len(rows[0])]


def _value(cell: str) -> str | list[Picture]:
    """Return the text or the pictures from which `markdown` made the cell."""
    if cell.startswith("!["):
        return [Picture(file, words) for words, file in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", cell)]
    return re.sub(r"\\(.)|<br>", lambda found: found[1] or "\n", cell)
