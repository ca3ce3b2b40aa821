"""Image files of every kind are decoded the same way everywhere. An error names the row of an unusable image. Untrusted ones
start no program, block nothing, and read no file of their own choice."""

import os
import random
import socket
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import GSM8K, ROOT, cpu_limit
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_vision import KINDS, dataset, make_batch, vlms  # noqa: F401  (a fixture)  # noqa: F401  (fixtures)
from tiny_vlm import encoded, odd_files, picture, pixels_of, png, row
from transformers import AutoConfig
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from rl import images
from rl.data import image_prompts
from rl.data.prompts import PromptOrder
from rl.errors import ImageError, UserError
from rl.learning.batch_images import _THREAD, BatchImages


def exif(orientation: int) -> Image.Exif:
    out = Image.Exif()
    out[0x0112] = orientation
    return out


SEEN = np.asarray(picture(40, 30, seed=5))  # [30, 40, 3]
TURNED = {1: SEEN, 3: SEEN[::-1, ::-1], 6: SEEN.transpose(1, 0, 2)[::-1], 8: SEEN.transpose(1, 0, 2)[:, ::-1]}


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", TURNED)
def test_an_image_that_exif_turns_is_seen_upright(format, orientation):
    """TURNED: how a camera stores a picture so that its EXIF turns it upright."""
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(Image.fromarray(TURNED[orientation]), format, exif=exif(orientation), **options)
    assert images.size(data) == (40, 30) and np.array_equal(images.to_rgb(data), SEEN)


ODD = odd_files()


@pytest.mark.parametrize("kind", ODD)
def test_what_people_s_data_holds_is_seen_as_it_looks(kind):
    """vLLM sees it so, too (tests/tools/vllm_kinds.py)."""
    data, seen = ODD[kind]
    assert images.size(data) == seen.size and np.array_equal(images.to_rgb(data), np.asarray(seen))


@settings(max_examples=60)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF"]), st.integers(0, 2**32))
def test_damage_is_an_image_error_or_an_image(format, seed):
    """A file with a few changed bytes or a missing end gives an image or an ImageError, nothing else."""
    rng = random.Random(seed)
    data = bytearray(encoded(Image.fromarray(SEEN), format))
    for _ in range(rng.randint(0, 3)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    data = bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    for act in (images.size, images.to_rgb):
        try:
            act(data)
        except ImageError as error:
            assert str(error) and "\n" not in str(error)


def test_a_huge_image_is_refused_by_its_header():
    data = bytearray(encoded(Image.new("L", (8, 8))))
    data[16:24] = (30_000).to_bytes(4, "big") * 2
    header = data[12:29]
    data[29:33] = zlib.crc32(header).to_bytes(4, "big")
    with pytest.raises(ImageError, match=r"30000 x 30000 pixels, more than|exceeds limit"):
        images.size(bytes(data))


# ------------------------------------------------------------------------------------------------ rows and tokens


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_and_tokens_are_those_of_transformers(vlms, kind):  # noqa: F811
    """For plain images, which both libraries decode alike. Tokens are counted from the header alone."""
    prep = image_prompts.ImagePrep(vlms[kind], AutoConfig.from_pretrained(vlms[kind]))
    theirs = AutoImageProcessor.from_pretrained(vlms[kind], backend="pil")
    for width, height in [(90, 60), (3, 40), (400, 30), (700, 500), (1, 1)]:
        image = picture(width, height, seed=width)
        expected = theirs([image], return_tensors="pt")
        pixels, grid = prep.prepare([encoded(image)])
        assert torch.equal(pixels, expected["pixel_values"]) and torch.equal(grid, expected["image_grid_thw"])
        assert prep.cut.grid(width, height) == tuple(grid[0].tolist())
        assert prep.cut.count(width, height) == int(grid[0].prod()) // 4


def broken(**image) -> dict:
    good = row("<image>How many?", [picture(90, 60)])
    return {**good, "images": [image]}


BAD = {  # rows -> what is said
    "no image for a place": ([row("<image> and <image>", [picture(90, 60)])], "row 0: the prompt has 2 places.* has 1 images"),
    "no place for an image": ([row("How many?", [picture(90, 60)])], "row 0: the prompt has 0 places .* the row has 1 images"),
    "an image token in the text": ([row("<|image_pad|>", [])], "row 0: the prompt has 1 places .* the row has 0 images"),
    "no image file": ([broken(bytes=b"no image", path=None)], "row 0: image 0 is no image that can be read"),
    "a header cut short": ([broken(bytes=encoded(picture(9, 9))[:20], path=None)], "row 0: image 0 is no image that can"),
    "an absent file": ([broken(bytes=None, path="absent.png")], r"row 0: image 0 cannot be read \(No such file.*absent\.png"),
    "a URL": ([broken(bytes=None, path="https://a.b/c.png")], "row 0: image 0 is a URL"),
    "an empty one": ([broken(bytes=None, path=None)], "row 0: image 0 is empty"),
    "too narrow": ([row("<image>", [picture(1000, 2)])], "row 0: an image has 1000 x 2 pixels, which the model cannot take"),
    "too long": ([row("<image>" * 9, [picture(700, 700)] * 9)], "--max-prompt-length 100.*or lower max_pixels in"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_before_the_first_step(vlms, tmp_path, case):  # noqa: F811
    table, said = BAD[case]
    Dataset.from_list([*table, row("Fine.", [])]).to_parquet(file := tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=f"rows.parquet {said.removeprefix('rows.parquet ')}" if "row 0" in said else said) as e:
        dataset(vlms["qwen3-vl"], str(file), max_prompt_length=100)
    assert "\n" not in str(e.value)


def test_too_long_prompts_are_left_out_and_never_cut_through_an_image(vlms, tmp_path):  # noqa: F811
    Dataset.from_list([row("<image>" * 9, [picture(700, 700)] * 9), row("Fine.", [])]).to_parquet(
        file := tmp_path / "a.parquet"
    )
    assert len(dataset(vlms["qwen3-vl"], str(file), max_prompt_length=100, filter_overlong_prompts=True)) == 1
    for side in ("left", "right"):
        with pytest.raises(UserError, match=r"row 0: the prompt has .* tokens, more than"):
            dataset(vlms["qwen3-vl"], str(file), max_prompt_length=100, truncation=side)


def test_paths_are_relative_to_the_rows_file(vlms, tmp_path):  # noqa: F811
    (tmp_path / "pictures").mkdir()
    picture(90, 60).save(tmp_path / "pictures" / "a.png")
    rows = [{**row("<image>How many?", [picture(90, 60)]), "images": [path]} for path in ("pictures/a.png",)]
    Dataset.from_list(rows).to_parquet(file := tmp_path / "a.parquet")
    (by_path,) = dataset(vlms["qwen3-vl"], str(file))
    Dataset.from_list([row("<image>How many?", [picture(90, 60)])]).to_parquet(file)
    (by_bytes,) = dataset(vlms["qwen3-vl"], str(file))
    assert by_path.ids == by_bytes.ids and torch.equal(pixels_of(by_path.images), pixels_of(by_bytes.images))


# ------------------------------------------------------------------------------------------------------ the learner


def test_pixels_are_prepared_once_by_whoever_comes_first(vlms, tmp_path, monkeypatch):  # noqa: F811
    """The thread prepares the next row's pixels during a computation. Pixels beyond the limit are dropped and made again."""
    table = [row("<image>How many?", [picture(90, 60, seed)]) for seed in range(4)]
    Dataset.from_list(table).to_parquet(file := tmp_path / "a.parquet")
    prompts, made = dataset(vlms["qwen3-vl"], str(file)), []
    prepare = prompts.prep.prepare
    monkeypatch.setattr(prompts.prep, "prepare", lambda sources: (made.append(sources[0]), prepare(sources))[1])
    batch = make_batch(prompts, [9, 9])
    rows = [batch.images.inputs([len(prompts[g].ids)], [-1], [g], torch.device("cpu"))["images"] for g in range(4)]
    idle = lambda: _THREAD.submit(lambda: None).result()  # noqa: E731  (behind what the thread was asked for)
    idle()
    assert made == [prompts[0].images.sources[0]]
    first = [rows[0].pixels()]
    idle()
    assert made == [prompts[g].images.sources[0] for g in (0, 1)]
    first += [of.pixels() for of in rows[1:]]
    assert len(made) == 4
    monkeypatch.setattr(image_prompts, "KEPT_BYTES", 2 * first[0].nbytes)
    idle()
    prompts.prep._kept.clear()
    again = [of.pixels() for _ in range(2) for of in rows]
    assert all(torch.equal(a, b) for a, b in zip(first * 2, again, strict=True)) and len(made) > 4
    idle()
    assert sum(of.nbytes for of in prompts.prep._kept.values()) <= 3 * first[0].nbytes


def test_a_row_that_has_changed_is_not_trained(vlms, tmp_path):  # noqa: F811
    """The learner reads the rows again. Another image of the same size has the same ids."""
    file = tmp_path / "a.parquet"
    Dataset.from_list([row("<image>How many?", [picture(90, 60, 0)])]).to_parquet(file)
    batch = make_batch(dataset(vlms["qwen3-vl"], str(file)), [9, 9])
    Dataset.from_list([row("<image>How many?", [picture(90, 60, 1)])]).to_parquet(file)
    now = BatchImages(dataset(vlms["qwen3-vl"], str(file)), PromptOrder(1, 0, shuffle=False), batch.images.groups)
    with pytest.raises(RuntimeError, match=r"a\.parquet row 0: the prompt or its images are not what the generator"):
        now.inputs([9], [-1], [0], torch.device("cpu"))


def test_real_geometry_problems(vlms):  # noqa: F811
    file = GSM8K.parent / "geo3k" / "train.parquet"
    if not file.exists():
        pytest.skip(f"no geometry problems at {file}")
    for prompt in dataset(vlms["qwen3-vl"], str(file), max_prompt_length=1000):
        token = AutoConfig.from_pretrained(vlms["qwen3-vl"]).image_token_id
        assert prompt.ids.count(token) == len(prompt.images.places) == int(prompt.images.grid.prod()) // 4
        assert [prompt.ids[i] for i in prompt.images.places] == [token] * len(prompt.images.places)
        assert prompt.text.count("<|image_pad|>") == 1 and len(pixels_of(prompt.images)) == int(prompt.images.grid.prod())


# ----------------------------------------------------------------------------------------------------- untrusted images


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"


PNG = png(picture(40, 30))


def dos_eps() -> bytes:
    """PostScript behind a binary header, which PIL also recognises."""
    return struct.pack("<IIIIIIIH", 0xC6D3D0C5, 30, len(EPS), 0, 0, 0, 0, 0xFFFF) + EPS


OTHERS = {"eps": EPS, "dos eps": dos_eps(), "wmf": b"\xd7\xcd\xc6\x9a" + bytes(60), "pdf": b"%PDF-1.4\n" + bytes(60)}
OTHERS |= {format: encoded(picture(40, 30), format) for format in ("ICO", "PCX", "TGA", "SGI", "IM", "DDS", "ICNS")}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_refused_and_start_no_program(name, tmp_path, monkeypatch):
    called = tmp_path / "called"
    for program in ("gs", "gswin64c", "gswin32c", "convert", "xv"):
        stub = tmp_path / "bin" / program
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/sh\necho $0 >> {called}\nexit 1\n")
        stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for act in (images.size, images.to_rgb):
        with pytest.raises(ImageError, match="is no image that can be read"):
            act(OTHERS[name])
    assert not called.exists()


# --------------------------------------------------------------------------------------------------------- paths


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have 107 characters
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


UNUSUAL = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to a pipe": link_to_a_pipe,
    "socket": bind,
    "too large": lambda path: (path.touch(), os.truncate(path, images.LARGEST_FILE + 1)),
    "missing": lambda path: None,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_path_that_is_no_image_file_is_refused_at_once(kind, tmp_path):
    UNUSUAL[kind](tmp_path / "it")
    path = tmp_path / "it"
    with cpu_limit(5):
        for value in (str(path), f"file://{path}", {"bytes": None, "path": str(path)}):
            with pytest.raises(ImageError, match=rf"{path}"):
                images.read(value, tmp_path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The caches of the hub and of `datasets`, and where a dataset's files lie in them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    own = tmp_path / "hub" / "datasets--some--name"
    (own / "blobs").mkdir(parents=True)
    (own / "snapshots" / "1").mkdir(parents=True)
    (own / "blobs" / "abc").write_bytes(PNG)
    (own / "snapshots" / "1" / "a.png").symlink_to("../../blobs/abc")
    (tmp_path / "downloads" / "extracted").mkdir(parents=True)
    (tmp_path / "downloads" / "extracted" / "b.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    return own


def test_a_hub_dataset_reads_its_own_files(hub, tmp_path):
    directory, roots = images.places("some/name:config")
    for path in (hub / "snapshots" / "1" / "a.png", tmp_path / "downloads" / "extracted" / "b.png"):
        assert images.files_of([str(path), {"bytes": None, "path": str(path)}], directory, roots) == [PNG] * 2


@pytest.mark.parametrize(
    "path", ["{}/secret.png", "../../secret.png", "/etc/hostname", "snapshots/1/link.png", "file://{}/secret.png"]
)
def test_a_hub_dataset_reads_no_other_files(path, hub, tmp_path):
    (hub / "snapshots" / "1" / "link.png").symlink_to(tmp_path / "secret.png")
    directory, roots = images.places("some/name")
    with pytest.raises(ImageError, match=r"image 0 is .*, a file outside of the dataset"):
        images.files_of([path.format(tmp_path)], directory, roots)


def test_every_place_that_opens_images_names_the_formats():
    houses = ("rl", "user_processes", "examples")
    sources = [*ROOT.glob("*.py"), *(file for house in houses for file in (ROOT / house).rglob("*.py"))]
    opening = [line for file in sources for line in file.read_text().splitlines() if "Image.open(" in line]
    assert opening and all("formats=" in line for line in opening), opening


def test_a_directory_of_images_is_its_own_limit(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(PNG)
    directory, roots = images.places(str(tmp_path / "set"))
    assert images.read("a.png", directory, roots) == PNG
    with pytest.raises(ImageError, match="outside of the dataset"):
        images.read("../b.png", directory, roots)


def test_a_hub_datasets_rows_are_read_by_its_rules(hub, tmp_path, vlms, monkeypatch):  # noqa: F811
    rows = [{**row("<image>How many?", []), "images": [str(tmp_path / "secret.png")]}]
    monkeypatch.setattr("rl.data.files._read_hub", lambda *_: Dataset.from_list(rows))
    with pytest.raises(UserError, match=r"some/name row 0: image 0 is .*outside of the dataset"):
        dataset(vlms["qwen3-vl"], "some/name")
