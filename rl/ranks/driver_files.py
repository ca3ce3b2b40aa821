"""The device files that a driver creates. This does not import torch, so that it works if torch is missing or broken."""

import glob
from pathlib import Path

NODES = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}  # in DEVICE_FILES: a file for each device that the driver exposes
DEVICE_FILES = Path("/dev")


def device_files(kind: str) -> list[str]:
    """Return the files of the devices of that kind. In a container, any of the machine's device numbers may be present."""
    found = glob.glob(str(DEVICE_FILES / NODES[kind]))
    return sorted(found, key=lambda name: (len(name), name))


def kind_by_files() -> str:
    """Return the kind of devices for which device files exist; "cpu" if there are none."""
    return next((kind for kind in NODES if device_files(kind)), "cpu")
