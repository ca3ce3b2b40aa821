"""The install commands of the NPU set are the same on every page, and run as far as a machine without an NPU allows.

Not tried: torch 2.10.0+cpu and triton-ascend 3.2.2, which are on indexes of their own, and whatever needs CANN.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT

ELSEWHERE = ("triton-ascend", "arctic-inference")  # not on PyPI in this version; a source package


def commands(page: str) -> list[str]:
    """Return the page's install commands, in order."""
    lines = [line.removeprefix("#").strip() for line in (ROOT / page).read_text().splitlines()]
    install = re.compile(r"(\w+=\S+ )*pip install ")
    return [line for line in lines if install.match(line) and "-e ." not in line]


def test_all_pages_have_the_same_commands():
    head = commands("requirements-npu.txt")
    assert len(head) == 5 and "arctic-inference" in head[2] and "VLLM_TARGET_DEVICE=empty" in head[4]
    assert commands("docs/ascend.md") == head
    assert commands("docs/ascend.zh.md") == head


def test_the_commands_name_the_versions_of_the_set():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements-npu.txt").read_text(), re.M))
    head = commands("requirements-npu.txt")
    assert f"torch=={pins['torch']} " in head[0]
    assert re.search(r"vllm==(\S+)", head[4])[1] == pins["vllm-ascend"], "vllm-ascend is released for one vLLM"
    assert f"VLLM_VERSION_OVERRIDE={pins['vllm-ascend']} " in head[4]


# ------------------------------------------------------------------------------------------------- what PyPI serves


def pip(*arguments: str, python: str = sys.executable, environment: dict[str, str] | None = None, timeout: float = 500):
    """Return pip's finished process. Skip the test without a network."""
    command = [python, "-m", "pip", *arguments]
    done = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=timeout)
    if done.returncode and re.search(r"NewConnectionError|Temporary failure|Network is unreachable|timed out", done.stderr):
        pytest.skip("the package index cannot be reached")
    return done


@pytest.fixture(scope="module")
def builder(tmp_path_factory) -> str:
    """A Python with the packages of the second command. torch is the one of these tests."""
    directory = tmp_path_factory.mktemp("builder")
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=120)
    python = str(directory / "bin" / "python")
    (site,) = (directory / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(str(Path(importlib.metadata.distribution("torch").locate_file(""))))
    tools = re.findall(r'"([^"]+)"|(\S+)', commands("requirements-npu.txt")[1].partition("pip install ")[2])
    done = pip("install", "--quiet", *(quoted or plain for quoted, plain in tools), python=python)
    assert done.returncode == 0, done.stderr[-3000:]
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number, wheel", [(2, "arctic_inference-*.whl"), (4, "vllm-0.23.0-*.whl")])
def test_what_has_no_wheel_is_built(builder, number, wheel, tmp_path):
    """With the same command, but `pip wheel --no-deps` in place of `pip install`. The next test covers its dependencies."""
    words = commands("requirements-npu.txt")[number].split()
    variables = dict(word.split("=", 1) for word in words[: words.index("pip")])
    arguments = words[words.index("install") + 1 :]
    variables["PATH"] = f"{Path(builder).parent}:{os.environ['PATH']}"  # as in an environment that is activated
    variables["VIRTUAL_ENV"] = str(Path(builder).parents[1])
    done = pip("wheel", "--no-cache-dir", "--no-deps", "-w", str(tmp_path), *arguments, python=builder, environment=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(tmp_path.glob(wheel)), [path.name for path in tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_set_resolves_for_an_ascend_machine(tmp_path):
    """For Linux on aarch64, glibc 2.34, from wheels alone; what ELSEWHERE names aside."""
    target = ["--platform", "manylinux_2_34_aarch64", "--python-version", "3.11", "--only-binary=:all:"]
    done = pip("download", "--quiet", "--no-deps", "-d", str(tmp_path), *target, "vllm-ascend==0.23.0")
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        needs = re.findall(r"^Requires-Dist: (.+)$", wheel.read(name).decode(), re.M)
    own = [line.partition("#")[0].strip() for line in (ROOT / "requirements-npu.txt").read_text().splitlines()]
    wanted = [line for line in [*own, *needs] if line and not line.startswith(("vllm-ascend", *ELSEWHERE))]
    assert len(wanted) < len([line for line in own if line]) + len(needs), "something is left out"
    (tmp_path / "wanted.txt").write_text("\n".join(wanted))
    tags = [word for minor in range(34, 11, -1) for word in ("--platform", f"manylinux_2_{minor}_aarch64")]
    how = [
        "--dry-run",
        "--ignore-installed",
        "--only-binary=:all:",
        "--python-version",
        "3.11",
        "--target",
        str(tmp_path / "to"),
    ]
    how += ["--report", str(tmp_path / "report.json")]
    done = pip("install", *how, *tags, "--platform", "manylinux2014_aarch64", "-r", str(tmp_path / "wanted.txt"), timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    found = {(package["metadata"]["name"], package["metadata"]["version"]) for package in report["install"]}
    assert {("torch", "2.10.0"), ("transformers", "5.5.4")} <= found
