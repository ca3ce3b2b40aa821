"""The life of a rank's process, including its last message and its exit code."""

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch.distributed

from rl.errors import Stopped, UserError
from rl.masking import masked
from rl.printable import printable
from rl.ranks import device, dist, failures, heartbeat, signals, stops, streams, watchdog


def run(main: Callable, join: Callable = dist.init) -> None:
    """Run a script's main on this rank and end the process. The first rank that fails prints a UserError as one message, any
    other error with its traceback, and exits with code 1; torchrun then ends the other ranks. The exit code is 0 after a stop
    by SIGTERM, 143 if training had not begun, 130 after Ctrl-C. A crash in native code prints every thread's Python stack."""
    signals.install_handlers()
    gc.enable()  # paused during the script's imports (rl/ranks/startup.py)
    streams.outlive_output()
    faulthandler.enable()
    code = 0
    name = f"rank {os.environ.get('RANK', 0)}"
    try:
        if "RANK" in os.environ:
            _die_with_parent()
        joined = join()
        name = joined.name
        main(joined)
        with watchdog.doing("all ranks to end"):
            if torch.distributed.is_initialized():  # vLLM's engine destroys it when it is collected
                torch.distributed.destroy_process_group()
        stops.end_well()
    except Stopped as stopped:
        if str(stopped):
            print(stopped, file=sys.stderr, flush=True)
        stops.end_well(stopped_with=0)
    except UserError as error:
        fail(error, name)
    except Exception as error:
        code = 1
        if signals.stop_requested() and (left := stops.exit_code()) is not None:  # the learners have left
            os._exit(left)
        if device.is_out_of_memory(error):
            fail(UserError(_out_of_memory(error)), name)
        _explain(name, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: on failure no destructor may wait for a lost rank, and on success gloo's threads sometimes abort at the
    # interpreter's end
    os._exit(code)


def fail(error: UserError, name: str = "") -> NoReturn:
    """End this process with exit code 1 and the message, which one rank of each node prints. name: this rank's."""
    text = masked(str(error))
    with watchdog.speaking:
        if failures.record(text, name or f"rank {os.environ.get('RANK', 0)}").first_of_node:
            print(printable(f"error: {text}"), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _explain(name: str, error: Exception) -> None:
    """Print the error: in full if it is the job's first failure, as one line on the other nodes."""
    lost = heartbeat.lost_ranks() if failures.lost_connection(error) else ""
    failures.leave_to_report()
    with watchdog.speaking:
        if lost:
            what = f"{lost} no longer answer"
            if failures.record(what, name).first_of_node:
                print(f"{name} failed: {what}", file=sys.stderr)
            return
        failure = failures.record(f"{type(error).__name__}: {error}", name)
        if failure.first:
            print(f"{name} failed:", file=sys.stderr)
            print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        elif failure.first_of_node and (cause := failures.cause()):
            print(printable(f"{name} stops: {cause}"), file=sys.stderr)


def _out_of_memory(error: Exception) -> str:
    """Return the message for a device that is out of memory: torch's own, the line of this project's code, and what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    where = f" ({os.path.relpath(own[-1].filename)}, line {own[-1].lineno}, {own[-1].name})" if own else ""
    return (
        f"the device has no memory left{where}: {str(error).partition('. GPU ')[0]}\n"
        "For the learner: --gradient-checkpointing, a lower number for --max-tokens-per-micro-batch, --optimizer-offload, "
        "--optim adamw_8bit, or more learners, which share weights and moments.\n"
        "For vLLM on the same device: a lower --gpu-memory-utilization, which is its share of all memory, or --max-num-seqs.\n"
        "`python plan.py SCRIPT <your flags> --device H100-80GB` says without the device whether it fits (docs/plan.md)."
    )


def _die_with_parent() -> None:
    """Let this rank end when its torchrun is killed (Linux); end it now if that has already happened."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        with open("/proc/1/cmdline", "rb") as file:
            launcher = file.read()
        if os.getppid() == 1 and b"python" not in launcher and b"torch" not in launcher:  # a container's launcher may be 1
            os._exit(1)
