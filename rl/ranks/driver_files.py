"""The files that a driver makes for its devices. Imports no torch, so that it works if torch is missing or broken."""

import glob
from pathlib import Path

NODES = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}  # in DEVICE_FILES: one file for each device that the driver shows
DEVICE_FILES = Path("/dev")


def device_files(kind: str) -> list[str]:
    """Return the files of the devices of that kind; a container may show any of the machine's numbers."""
    found = glob.glob(str(DEVICE_FILES / NODES[kind]))
    return sorted(found, key=lambda name: (len(name), name))


def kind_by_files() -> str:
    """Return the kind of devices whose driver has made its files; "cpu" if none has."""
    return next((kind for kind in NODES if device_files(kind)), "cpu")
