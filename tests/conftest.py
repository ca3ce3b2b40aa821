"""Fixtures, and the processes that the tests' runs are forked from. What tests call stands in helpers.py."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import nodes
import pytest
from helpers import CONFIGS, GSM8K, ROOT, environment, save_model

# An example takes as long as it takes: other work on the machine is no failure.
hypothesis.settings.register_profile("patient", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """A directory with a tiny random model per kind of CONFIGS."""
    root = tmp_path_factory.mktemp("models")
    return {kind: save_model(kind, root / kind) for kind in CONFIGS}


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The demo's model."""
    from rl.demo import model_dir

    return model_dir()


@pytest.fixture(scope="session")
def demo_moe_model() -> str:
    """The demo's mixture of experts: made before a job that trains it, whose time limit is not for that."""
    from rl.demo_moe import model_dir

    return model_dir()


@pytest.fixture(scope="session")
def demo_vl_model() -> str:
    """The model of the demo with images."""
    from rl.demo_vl import model_dir

    return model_dir()


@pytest.fixture(scope="module")
def ranks():
    """This process as the only rank of a job."""
    import torch

    from rl import dist

    yield dist.init()
    torch.distributed.destroy_process_group()


@pytest.fixture
def network():
    """Makes networks of machines, as nodes.Network; a test is skipped where that cannot be done."""
    with ExitStack() as open_ones:

        def make(*how, **more) -> nodes.Network:
            try:
                return open_ones.enter_context(nodes.Network(*how, **more))
            except nodes.Unavailable as reason:
                pytest.skip(str(reason))

        yield make


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    if not (GSM8K / "train.parquet").exists():
        pytest.skip(f"no GSM8K parquet files at {GSM8K}: set RL_GSM8K to their directory")
    return GSM8K


IMPORTED = {  # by the processes that fork runs (tests/forks.py)
    "plain": ["train_sync", "train_one_step_off", "train_async"],
    "vllm": ["train_sync", "train_one_step_off", "train_async", "rl.engine_vllm"],
}
IMPORTED["plain"] += ["rl.demo", "datasets", "matplotlib.figure", "torch.distributed.run", "torch._dynamo"]


def pytest_configure(config) -> None:
    """Starts the processes that fork runs, one set for all workers, and makes the models that most runs train: no test's time
    limit pays for them."""
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    config.forks, where = [], tempfile.mkdtemp(prefix="rl-tests-")
    os.environ["RL_TESTS"] = where
    for kind, modules in IMPORTED.items():
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{where}/{kind}")
            listener.listen()
            command = [sys.executable, ROOT / "tests" / "forks.py", str(listener.fileno()), *modules]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "pass_fds": [listener.fileno()]}
            config.forks.append(subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, **pipes))
    make = "from rl import demo, demo_vl; demo.model_dir(); demo_vl.model_dir()"
    subprocess.run([sys.executable, "-c", make], cwd=ROOT, check=True, timeout=900)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the tests themselves, which import torch later: workers must not fight for cores


SLOWEST = ["test_checkpoint", "test_split", "test_engine_vllm", "test_train_sync", "test_algorithm"]
SLOWEST += ["test_split_vllm", "test_ring"]


def pytest_collection_modifyitems(items) -> None:
    """The slowest files first: none of them begins when the other worker is about to end."""
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST))


def pytest_unconfigure(config) -> None:
    for process in getattr(config, "forks", []):
        process.stdin.close()
        process.wait()
    if hasattr(config, "forks"):
        shutil.rmtree(os.environ["RL_TESTS"])
