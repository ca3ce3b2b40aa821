"""Images for the page, as data: URLs. Each is decoded and drawn again as PNG, so that no file of others reaches the browser.
A record has only the digest of the data's images: they are read again, if the data's files are still there."""

import base64
import io
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from PIL import Image

from rl import images
from rl.data.files import read_table, weights_of
from rl.data.tables import DEMOS
from rl.errors import ImageError, UserError

MOST = 640  # pixels of a side
_table = lru_cache(maxsize=2)(lambda file: read_table(file, "train"))


def urls(files: Iterable[bytes]) -> list[str]:
    """Return the images of these files. Raise ImageError if one cannot be read."""
    found = []
    for data in files:
        picture = Image.fromarray(images.to_rgb(data))
        picture.thumbnail((MOST, MOST))
        picture.save(buffer := io.BytesIO(), "PNG")
        found.append("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    return found


def of_row(where: str, flags: dict) -> list[str]:
    """Return the images of a row ("train.parquet row 17"). flags: of the run. Raise UserError if they cannot be read."""
    file, _, number = where.rpartition(" row ")
    files, _ = weights_of(flags["train_files"])
    if file not in DEMOS and (file not in files or not Path(file).is_file()):  # a record can name no other file
        raise UserError(f"{file} is not here, so its images cannot be shown. Start view.py where training was started.")
    try:
        return urls(images.files_of(_table(file)[int(number)].get(flags["image_key"]), Path(file).parent))
    except (ImageError, IndexError, ValueError) as error:
        raise UserError(f"{where}: its images cannot be read ({error}). Has the file changed?") from error
