"""Facts about the machine that a run records or relies on: its memory, and the device files that a driver creates.

Imports no torch, so that it works if torch is missing or broken.
"""

import contextlib
import glob
import os
import platform
from pathlib import Path

NODES = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}  # in DEVICE_FILES: a file for each device that the driver exposes
DEVICE_FILES = Path("/dev")


def machine() -> dict:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "memory_gb": round(memory / 2**30, 1)}


def cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return platform.processor() or platform.machine()


def available_memory() -> int:
    """Return the bytes that this process may still allocate, by the machine's memory and the limits of its control groups."""
    free = [2**62]
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        free += [1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.strip().split(":", 2)
            if controllers in ("", "memory"):
                root = Path("/sys/fs/cgroup", controllers)
                free += [_left_of(root / parent) for parent in (path.lstrip("/"), *map(str, Path(path.lstrip("/")).parents))]
    return max(0, min(free))


def _left_of(group: Path) -> int:
    """Return the bytes left under a control group's limit (version 1 or 2), counting cached files as free."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):
            most, used = (int((group / name).read_text()) for name in (limit, usage))
            words = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return most - used + int(words.get("total_inactive_file", words.get("inactive_file", 0)))
    return 2**62  # no limit ("max"), or no such group


def device_files(kind: str) -> list[str]:
    """Return the files of the devices of that kind. In a container, any of the machine's device numbers may be present."""
    found = glob.glob(str(DEVICE_FILES / NODES[kind]))
    return sorted(found, key=lambda name: (len(name), name))
