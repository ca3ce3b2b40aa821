"""Untrusted images start no program, block nothing, and read no file of their own choice."""

import os
import socket
import struct
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import ROOT, cpu_limit
from test_vision import dataset, vlms  # noqa: F401  (a fixture)
from tiny_vlm import encoded, picture, png, row

from rl import images
from rl.errors import ImageError, UserError

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
    houses = ("rl", "user_code", "examples")
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
