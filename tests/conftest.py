"""What several test files share: tiny random models, the demo's model, and ways to run a script as a user would.

torch and transformers are imported where they are used: xdist's controller loads this file too, and runs no test.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
SMALL = dict(
    vocab_size=32,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    max_position_embeddings=256,
    initializer_range=0.2,  # large enough that log-probs differ from token to token
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)


def config(name: str, **more):
    import transformers

    return getattr(transformers, name)(**SMALL, **more)


CONFIGS = {
    "qwen2-tied": lambda: config("Qwen2Config", tie_word_embeddings=True),
    "qwen2-untied": lambda: config("Qwen2Config", tie_word_embeddings=False),
    "qwen3": lambda: config("Qwen3Config", head_dim=16, tie_word_embeddings=False),
}


def save_model(kind: str, path: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]()).save_pretrained(path)
    return str(path)


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
def gsm8k() -> Path:
    if not (GSM8K / "train.parquet").exists():
        pytest.skip(f"no GSM8K parquet files at {GSM8K}")
    return GSM8K


# --------------------------------------------------------------------------------------------------- running scripts

IMPORTED = {  # by the processes that fork runs (tests/forks.py)
    "plain": ["train_sync", "train_one_step_off", "train_async"],
    "vllm": ["train_sync", "train_one_step_off", "train_async", "rl.engine_vllm"],
}
IMPORTED["plain"] += ["rl.demo", "datasets", "matplotlib.figure", "torch.distributed.run", "torch._dynamo", "test_batch"]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | more


def pytest_configure(config) -> None:
    """Starts the processes that fork runs, one set for all workers, and makes the demo's model before there are any: beside
    other tests its two threads would take minutes."""
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
    make = "from rl.demo import model_dir; model_dir()"
    subprocess.run([sys.executable, "-c", make], cwd=ROOT, check=True, timeout=900)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the tests themselves, which import torch later: workers must not fight for cores


SLOWEST = ["test_checkpoint", "test_split", "test_train_sync", "test_engine_vllm", "test_algorithm"]
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


def run_script(
    *arguments,
    ranks: int | None = None,
    timeout: float = 240,
    check: bool = True,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    imported: str = "plain",
) -> subprocess.CompletedProcess:
    """Runs a script of the repository, under torchrun if `ranks` is given; returns the finished process with its output as
    text. `fresh` starts Python, and torchrun, as a user does; otherwise they are forks of a process that has `imported` what
    they need (tests/forks.py), which saves six seconds a rank."""
    arguments = list(map(str, arguments))
    if fresh:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        command = [sys.executable, *torchrun, *arguments]
        env = environment(**(env or {}))
        done = subprocess.run(command, cwd=ROOT, env=env, timeout=timeout, text=True, capture_output=True)
    else:
        with (
            tempfile.TemporaryDirectory() as where,
            fork(where, *arguments, ranks=ranks, env=env, imported=imported) as running,
        ):
            running.settimeout(timeout)
            try:
                code = running.recv(16)
            except TimeoutError:
                raise AssertionError(f"not done in {timeout} s: {arguments}") from None
            said = [Path(where, name).read_text() for name in ("stdout", "stderr")]
        assert code, "the process that forks runs has ended: what it said stands above"
        done = subprocess.CompletedProcess(arguments, int(code), *said)
    if check and done.returncode:
        raise AssertionError(
            f"exit code {done.returncode}\n--- stdout\n{done.stdout[-4000:]}\n--- stderr\n{done.stderr[-6000:]}"
        )
    return done


def fork(where, *arguments, ranks: int | None = None, env: dict[str, str] | None = None, imported: str = "plain"):
    """Starts a forked run, whose stdout and stderr go to files of that name; returns a socket over which its exit code will
    come, and whose closing ends it."""
    request = {"arguments": list(map(str, arguments)), "environment": environment(**(env or {})), "ranks": ranks}
    request |= {name: str(Path(where, name)) for name in ("stdout", "stderr")}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{os.environ['RL_TESTS']}/{imported}")
    connection.sendall(json.dumps(request).encode() + b"\n")
    return connection


def train(script: str, *flags, out: Path, **how) -> tuple[dict[int, dict], Path, subprocess.CompletedProcess]:
    """Runs a training script as run_script does; returns (metrics by step, the run's directory, the finished process)."""
    done = run_script(script, "--output-dir", out, *flags, **how)
    (run,) = out.iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}, run, done


def weights(run: Path) -> dict:
    """The tensors of a run's only export, by name."""
    from safetensors.torch import load_file

    (export,) = run.glob("step_*")
    return load_file(export / "model.safetensors")


def bits(run: Path) -> dict[str, bytes]:
    """The same, to be compared bit for bit."""
    return {name: weight.numpy().tobytes() for name, weight in weights(run).items()}
