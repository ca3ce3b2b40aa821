"""Images in rows of the data, decoded to RGB in one way for every rank, machine and format.

An image is turned as its EXIF says, transparency becomes white, 16 bits and floats are scaled to 8 bits, and an animation is
its first frame. The size is read from the header, without decoding the image.

Data may come from anyone. Only FORMATS are opened, which PIL decodes by itself: for others it starts programs such as
Ghostscript. A path must name a regular file of at most LARGEST_FILE bytes. Rows of a hub dataset may only name files of that
dataset. Left out: videos, and images from the network.
"""

import io
import math
import re
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps

from rl.errors import ImageError

TURNED = {5, 6, 7, 8}  # EXIF orientations by a quarter turn: width and height change places
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # refused below, with the remedy
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
LARGEST_FILE = 1 << 28  # bytes
PLACE = "<image>"  # in a prompt's text, where an image belongs


class Cut(NamedTuple):
    """How a model cuts an image into patches."""

    patch: int  # pixels of a side
    merge: int  # patches of the side of an image token
    least: int  # pixels of a scaled image
    most: int

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(frames, rows, columns) of patches of an image of this many pixels. Raises ImageError if it is too narrow."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        try:
            height, width = smart_resize(height, width, self.patch * self.merge, self.least, self.most)
        except ValueError as error:
            raise ImageError(f"an image has {width} x {height} pixels, which the model cannot take ({error})") from None
        return 1, height // self.patch, width // self.patch

    def count(self, width: int, height: int) -> int:
        """Image tokens of an image of this many pixels."""
        return math.prod(self.grid(width, height)) // self.merge**2


def files_of(value: object, directory: Path, roots: Sequence[Path] | None = None) -> list[bytes]:
    """The image files in a row's column, a list of images, one, or none. directory, roots: of `places`. Raises ImageError."""
    if value is None:
        return []
    return [_numbered(i, read, one, directory, roots) for i, one in enumerate(value if isinstance(value, list) else [value])]


def places(name: str) -> tuple[Path, tuple[Path, ...] | None]:
    """(the directory of relative paths, the directories in which image files must be; None: any) of a --train-files. Rows of a
    user's file may name any file, rows of a hub dataset or of a directory only files that belong to it."""
    path = Path(name)
    if path.is_file():
        return path.parent, None
    if path.is_dir():
        return path, (path,)
    from datasets import config
    from huggingface_hub.constants import HF_HUB_CACHE

    dataset = name.partition(":")[0]
    downloaded = Path(HF_HUB_CACHE) / f"datasets--{dataset.replace('/', '--')}"
    return downloaded, (downloaded, Path(config.DOWNLOADED_DATASETS_PATH))


def with_places(messages: Sequence[dict]) -> list[dict]:
    """Chat messages in which each PLACE has become a part of its own, as chat templates take images."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(content: str) -> str | list[dict]:
    if PLACE not in content:
        return content
    pieces = [piece for piece in re.split(f"({PLACE})", content) if piece]
    return [{"type": "image"} if piece == PLACE else {"type": "text", "text": piece} for piece in pieces]


def sizes(files: Sequence[bytes]) -> list[tuple[int, int]]:
    """(width, height) of each image as it is seen, from the headers. Raises ImageError."""
    return [_numbered(i, size, data) for i, data in enumerate(files)]


def _numbered(number: int, act, *arguments):
    try:
        return act(*arguments)
    except ImageError as error:
        raise ImageError(f"image {number} {error}") from None


def read(value: object, directory: Path = Path(), roots: Sequence[Path] | None = None) -> bytes:
    """The bytes of an image file. value: bytes, a path (relative to `directory`), a PIL image, or {"bytes", "path"} as
    `datasets` stores them. roots: directories in which a path must end, with links followed. Raises ImageError."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return buffer.getvalue()
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        raise ImageError("is empty" if not value else f"is a {type(value).__name__}, neither bytes nor a path")
    if value.startswith(("http://", "https://", "data:")):
        raise ImageError("is a URL; download it, and put its bytes or its path there")
    try:
        return _content(directory / value.removeprefix("file://"), roots)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ImageError(f"cannot be read ({getattr(error, 'strerror', None) or error}: {value})") from None


def _content(path: Path, roots: Sequence[Path] | None) -> bytes:
    """The bytes of a regular file that is not too large, in one of the roots. Raises ImageError, OSError or ValueError."""
    if roots is not None:
        path = path.resolve()
        if not any(path.is_relative_to(root.resolve()) for root in roots):
            raise ImageError(f"is {path}, a file outside of the dataset; put the image's bytes into the row")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a device may have effects
        raise ImageError(f"is {path}, which is no regular file; put the image's path or bytes there")
    if status.st_size > LARGEST_FILE:
        raise ImageError(f"has {status.st_size:,} bytes, more than {LARGEST_FILE:,} ({path}); make it smaller")
    return path.read_bytes()


def size(data: bytes) -> tuple[int, int]:
    """(width, height) of the image as it is seen, from the header. Raises ImageError."""
    image = _open(data)
    turned = _exif(image).get(ExifTags.Base.Orientation) in TURNED
    return image.size[::-1] if turned and image.format != "TIFF" else image.size  # PIL itself turns a TIFF and its size


def to_rgb(data: bytes) -> np.ndarray:
    """The image [height, width, 3] uint8. Raises ImageError if it is damaged."""
    image = _open(data)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":  # more than 8 bits a pixel, which convert() would clip at 255
            image = Image.fromarray(_in_8_bits(image))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return np.asarray(image.convert("RGB"))
    except ImageError:
        raise
    except Exception as error:  # OSError, SyntaxError, ValueError, zlib's and struct's: it depends on the format
        raise ImageError(f"cannot be decoded ({_reason(error)})") from None


def _in_8_bits(image: Image.Image) -> np.ndarray:
    """The grey values [height, width] uint8 of an image of 16 or 32 bits, or of floats, from 0 to 1 or from 0 to 255. Raises
    ImageError for others: nothing says which value is white."""
    values = np.asarray(image)
    low = values.min()
    high = values.max()
    if not 0 <= low <= high <= (255 if image.mode == "F" else 65535):  # also true for NaN
        raise ImageError(f"has values from {low:g} to {high:g}, of which none is known to be white; save it with 8 or 16 bits")
    if image.mode == "F":
        return (values * (255 if high <= 1 else 1)).round().astype(np.uint8)
    return (values.astype(np.uint32) >> 8).astype(np.uint8)


def _open(data: bytes) -> Image.Image:
    """The image with its header read."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _exif(image)  # from here on size() and to_rgb() both see the header's orientation
    except Exception as error:
        raise ImageError(f"is no image that can be read ({_reason(error)})") from None
    width, height = image.size
    if width * height > Image.MAX_IMAGE_PIXELS:
        raise ImageError(f"has {width} x {height} pixels, more than {Image.MAX_IMAGE_PIXELS:,}; make it smaller")
    return image


def _exif(image: Image.Image) -> Image.Exif:
    """The EXIF data. PNG's own method would decode the whole image, to find any behind it."""
    return Image.Image.getexif(image)


def _reason(error: Exception) -> str:
    return (str(error).partition(" <_io")[0].strip() or type(error).__name__).splitlines()[0]
