"""--engine: which engine is chosen, which message is printed and what is refused, with and without vLLM."""

import sys
import types

import pytest
import torch

import train_async
import train_one_step_off
import train_sync
from rl.errors import UserError
from rl.generation.choose_engine import choose_engine, make_engine
from rl.generation.engine import EngineArgs

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "rl.generation.vllm.engine", None)  # importing it raises ImportError


@pytest.fixture
def with_vllm(monkeypatch):
    stub = types.SimpleNamespace(vllm=types.SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setitem(sys.modules, "rl.generation.vllm.engine", stub)


def test_auto_says_what_it_takes_and_why(without_vllm, capsys):
    assert choose_engine("auto", CPU) == "embedded"
    assert capsys.readouterr().out == "engine: embedded (the device is a CPU)\n"
    assert choose_engine("auto", GPU) == "embedded"
    assert capsys.readouterr().out.startswith("engine: embedded (vLLM cannot be imported: ")


def test_auto_takes_vllm_on_a_device_that_is_no_cpu(with_vllm, capsys):
    assert choose_engine("auto", GPU) == "vllm"
    assert capsys.readouterr().out == "engine: vllm (version 0.32.0 is installed)\n"
    assert choose_engine("auto", CPU) == "embedded"


def test_an_engine_that_is_asked_for_is_taken_silently(with_vllm, capsys):
    assert choose_engine("embedded", GPU) == "embedded" and choose_engine("vllm", CPU) == "vllm"
    assert capsys.readouterr().out == ""


def test_vllm_that_is_missing_is_said_with_a_remedy(without_vllm):
    with pytest.raises(UserError, match=r"--engine vllm: vLLM cannot be imported.*requirements-cuda.txt"):
        choose_engine("vllm", CPU)


def test_tensor_parallelism_needs_vllm(models):
    with pytest.raises(UserError, match=r"--rollout-tp 2: .* needs --engine vllm"):
        make_engine(models["qwen3"], EngineArgs(engine="embedded", rollout_tp=2), 64, "float32", CPU, False)


def test_an_engine_sleeps_only_where_it_takes_turns_with_a_learner():
    """vllm-ascend's sleep mode does not start with expandable segments."""
    scripts = (train_sync, train_one_step_off, train_async)
    assert [script.Args().engine_sleeps for script in scripts] == [True, False, False]
    assert not train_sync.Args(free_cache_engine=False).engine_sleeps
