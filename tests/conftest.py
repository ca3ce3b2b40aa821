"""Fixtures, and the processes from which the tests fork their runs. Functions that tests call are in helpers.py."""

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import helpers
import hypothesis
import nodes
import pytest
from helpers import CONFIGS, GSM8K, ROOT, demo, environment, save_model

os.environ.setdefault("RL_DEVICE", "cpu")  # on a machine with a GPU, too: RL_DEVICE=cuda pytest -m device

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
    return demo("demo")


@pytest.fixture(scope="session")
def demo_vl_model() -> str:
    """The model of the demo with images."""
    return demo("demo-vl")


@pytest.fixture(scope="module")
def ranks():
    """This process as the only rank of a job."""
    import torch

    from rl.ranks import dist

    yield dist.init()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def trainer(demo_model, ranks):
    """Trains steps of train_sync.py in this process, on the demo's model (tests/tools/trainer.py)."""
    from trainer import Trainer

    return Trainer(demo_model, ranks)


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


IMPORTED = {  # by the processes that fork runs (tests/tools/forks.py)
    "plain": ["train_sync", "train_one_step_off", "train_async"],
    "vllm": ["train_sync", "train_one_step_off", "train_async", "rl.generation.vllm.engine"],
}
IMPORTED["vllm"] += ["vllm.v1.worker.cpu_worker", "vllm.v1.core.sched.scheduler", "vllm.v1.attention.backends.cpu_attn"]
IMPORTED["vllm"] += ["vllm.model_executor.layers.quantization.online.base"]  # what an engine's start imports
IMPORTED["packages"] = ["transformers", "datasets", "matplotlib.figure", "torch.distributed.run", "torch._dynamo", "tyro"]
IMPORTED["plain"] += ["examples.demo.sums", *IMPORTED["packages"]]


class Forks:
    """The processes that fork runs (tests/tools/forks.py), one set for all workers. Each is started when a run first asks for
    it, by the process that outlives all workers and has an environment that no test has changed."""

    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="rl-tests-")
        self._processes: list[subprocess.Popen] = []
        self._environment = environment()
        self._waiting: dict[socket.socket, list[str]] = {}  # listening -> what its process imports
        for kind, modules in IMPORTED.items():
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{self.directory}/{kind}")
            listener.listen()
            self._waiting[listener] = modules
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._start_when_asked, name="forks", daemon=True)
        self._thread.start()

    def _start_when_asked(self) -> None:
        while True:
            ready, _, _ = select.select([*self._waiting, self._ended], [], [])
            if self._ended in ready:
                return
            for listener in ready:
                self._start(listener, self._waiting.pop(listener))

    def _start(self, listener: socket.socket, modules: list[str]) -> None:
        command = [sys.executable, ROOT / "tests" / "tools" / "forks.py", str(listener.fileno()), *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "pass_fds": [listener.fileno()]}
        started = subprocess.Popen(command, cwd=ROOT, env=self._environment, start_new_session=True, **pipes)
        self._processes.append(started)
        listener.close()

    def end(self) -> None:
        os.close(self._end)
        self._thread.join()
        os.close(self._ended)
        for listener in self._waiting:
            listener.close()
        for process in self._processes:
            process.stdin.close()
            process.wait()
        shutil.rmtree(self.directory)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    """Let helpers.command start processes for tests that are marked so: the plain tests have to be quick."""
    helpers.may_start = any(map(item.get_closest_marker, ("runs", "slow", "smoke")))


WORKERS = 3  # processes of one thread, which wait for each other now and then


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which reads the number
def pytest_cmdline_main(config) -> None:
    """Without -n, a whole run uses workers. A run of named files or tests uses none, because each worker would import
    everything."""
    option = config.option
    if hasattr(config, "workerinput") or getattr(option, "numprocesses", 0) is not None:
        return
    named = config.args_source is pytest.Config.ArgsSource.ARGS and not all(Path(name).is_dir() for name in config.args)
    option.numprocesses = 0 if named or option.usepdb or option.collectonly else WORKERS


def pytest_configure(config) -> None:
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    config.forks = Forks()
    os.environ["RL_TESTS"] = config.forks.directory
    os.environ["OMP_NUM_THREADS"] = "1"  # of the tests themselves, which import torch later: workers must not fight for cores


# The second and the third want no demo model: the first one's worker makes it meanwhile. By CPU seconds of the long tests, but
# for test_ring and test_learner, which are long in the plain ones.
SLOWEST = ["test_round_trips", "test_ring", "test_learner", "test_fake_accelerator", "test_layouts", "test_requirements"]
SLOWEST += ["test_real_model", "test_agent_runs", "test_teacher_runs", "test_split", "test_checkpoint", "test_engine_vllm"]
SLOWEST += ["test_doctor", "test_sharded_weights", "test_benchmarks", "test_train_sync"]
SLOWEST += ["test_hybrids", "test_nodes", "test_replay", "test_view", "test_vision_runs", "test_algorithm"]
SLOWEST += ["test_rewarded_runs"]


def pytest_collection_modifyitems(items) -> None:
    """Order the slowest files first, so that none starts when the other worker is nearly done."""
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST))


def pytest_unconfigure(config) -> None:
    if hasattr(config, "forks"):
        config.forks.end()
