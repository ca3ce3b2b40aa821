"""A process that has imported what every rank imports, and forks the tests' runs: a rank then starts in a moment instead of
the six seconds of its imports. A fork runs the script from its first line, under torchrun's own agent if there are ranks.

    python tests/tools/forks.py LISTENER MODULE ...   file descriptor of a listening socket; what to import at the first request

forked.py asks: three file descriptors and a line of JSON, the arguments of `job`, on a connection of its own; the
answers are the process's number and its exit code. Hanging up ends the run; the end of stdin ends this process. Forks share the
seed of hash() and have all modules from the start: where that could matter, tests start processes as a user does (fresh=True).
Where only packages are imported, a fork reads all of the project's code out of its script's directory, or PYTHONPATH.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback

import nodes

set_by_imports: dict[str, str] = {}  # environment variables
installed = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(":")]


class Rank:
    """A child, forked while this process has no threads, that begins when it is given what to run: to torchrun a Popen."""

    def __init__(self):
        order, self._orders = os.pipe()
        self.pid, self.returncode = os.fork(), None
        if not self.pid:
            with open(order) as orders:
                arguments, environment = json.loads(orders.readline())
            os.setsid()
            os.environ.update(environment)
            bear_mark(f"-{environment['LOCAL_RANK']}")
            leave(run_script, arguments)
        os.close(order)

    def begin(self, arguments: list[str], environment: dict[str, str]) -> "Rank":
        with open(self._orders, "w") as orders:
            orders.write(json.dumps([arguments, environment]) + "\n")
        return self

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.01)


def leave(act, *arguments) -> None:
    """Run the function, and end this process with the exit code that Python would have."""
    code = 0
    try:
        act(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def bear_mark(further: str = "") -> None:
    """By name: the environment that /proc shows of a fork is that of this file's process."""
    if mark := os.environ.get("MARK"):
        with open("/proc/self/comm", "w") as name:
            name.write(mark[:8] + further)


def run_script(arguments: list[str]) -> None:
    theirs = os.environ.get("PYTHONPATH", "").split(":")
    sys.argv, sys.path[:] = arguments, [os.path.dirname(arguments[0]), *theirs, *installed]
    runpy.run_path(arguments[0], run_name="__main__")


def run_torchrun(ranks: int, arguments: list[str]) -> None:
    waiting = [Rank() for _ in range(ranks + int(os.environ.get("SPARE_RANKS", 0)))]  # spare ones for torchrun's restarts
    import torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    # arguments: python -u script ...
    SubprocessHandler._popen = lambda _, arguments, environment: waiting.pop().begin(arguments[2:], environment)
    torch.multiprocessing._set_thread_name = lambda _: None  # torchrun would take the mark off
    alone = [] if "--nnodes" in arguments else ["--standalone"]
    run.main([*alone, "--nproc-per-node", str(ranks), *arguments])


def job(pipes: list[int], arguments: list[str], environment: dict[str, str], ranks: int, directory: str) -> None:
    os.setsid()
    os.chdir(directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has started the tests in the background
    os.environ.clear()
    os.environ.update(set_by_imports | environment)
    bear_mark()
    if "FORKED_PYTHON" in environment:
        sys.executable = str(nodes.ROOT / "tests" / "tools" / "python")
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (the old one knows where another file ended)
    if ranks:
        run_torchrun(ranks, arguments)
    else:
        run_script(arguments)


def serve(connection: socket.socket) -> None:
    _, pipes, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    if node := request["environment"].get("NODE"):  # a process on the machine where the run is to be (tests/tools/nodes.py)
        nodes.enter(int(node))
    pid = os.fork()
    if not pid:
        connection.close()
        leave(lambda: job(pipes, **request))
    for pipe in pipes:
        os.close(pipe)
    ended = os.pidfd_open(pid)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{pid}\n".encode())
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:  # nobody waits any more
        os.kill(pid, signal.SIGTERM)
        select.select([ended], [], [], 10)
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # ranks that never began
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def warm_up(scripts: list[str]) -> None:
    """Does once what every run does first, and what Python, transformers, torch and matplotlib keep of it: the flags, a model's
    forward pass, the names in its files, a figure. On one thread and without a backward pass, which would start threads: forks
    have none."""
    import torch
    from matplotlib.figure import Figure
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.conversion_mapping import get_model_conversion_mapping

    if scripts:
        from rl import flags
        from rl.ranks import device

        for script in scripts:
            flags.read(sys.modules[script].Args, args=[])
        device.kind.cache_clear()  # which a run may choose for itself
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=32, **sizes))
        model(input_ids=torch.ones(2, 8, dtype=torch.long))
        get_model_conversion_mapping(model)
    figure = Figure()
    figure.subplots().plot([0, 1], [0, 1], label="1.5")
    figure.axes[0].set(xlabel="step", title="a")
    figure.axes[0].legend()
    figure.tight_layout()
    figure.savefig(io.BytesIO(), dpi=150)


def compile_vllms_kernel() -> None:
    """vLLM compiles how it ranks a sampled token in the first step of every process: for one vocabulary, and then for any."""
    import torch
    import tqdm
    from torch._inductor import config
    from vllm.v1.sample.sampler import Sampler

    tqdm.tqdm.monitor_interval = 0  # without threads, as above
    with config.patch(compile_threads=1), torch.inference_mode():
        for vocabulary in (32, 48):
            Sampler.gather_logprobs(torch.zeros(2, vocabulary), 0, torch.zeros(2, dtype=torch.long))


def configure_vllm() -> None:
    """Do what an engine of vLLM spends seconds on when it starts: it sets the level of hundreds of loggers, and looks through
    all modules for kernels that a CPU computes otherwise. It examines a new kind of model in a process of its own, for which it
    would import everything again; here that is done in the fork."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    configure_logging(LoggingConfig())
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    registry._run_in_subprocess = lambda examine: examine()


def is_ours(module) -> bool:
    """Return whether a module is one of the project's, of those that this file needs itself."""
    return module.__name__ != "__main__" and (getattr(module, "__file__", None) or "").startswith(f"{nodes.ROOT}/")


def import_all(modules: list[str]) -> None:
    before = dict(os.environ)
    for name in modules:
        importlib.import_module(name)
    warm_up([name for name in modules if name.startswith("train_")])
    if "rl.generation.vllm.engine" in modules:
        compile_vllms_kernel()
        configure_vllm()
    if "train_sync" not in modules:
        for name in [name for name, module in sys.modules.items() if is_ours(module)]:
            del sys.modules[name]
    set_by_imports.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    gc.collect()
    gc.freeze()  # or each fork looks through a million objects again and again, and copies their memory


def main(listener: socket.socket, modules: list[str]) -> None:
    ready = False
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if not ready:
            import_all(modules)
            ready = True
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not os.fork():
            listener.close()
            leave(serve, connection)
        connection.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
