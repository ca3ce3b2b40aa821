"""The life of a rank's process, including its last message and its exit code."""

import contextlib
import ctypes
import faulthandler
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch.distributed

from rl.errors import Stopped, UserError
from rl.masking import masked
from rl.printable import printable
from rl.ranks import device, dist, launch, stops


def run(main: Callable, join: Callable = dist.init) -> None:
    """Run a script's main on this rank and end the process. The first rank that fails prints a UserError as one message, any
    other error with its traceback, and exits with code 1; torchrun then ends the other ranks. The exit code is 0 after a stop
    by SIGTERM. A crash in native code prints every thread's Python stack."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, also in a collective or in the background of a shell
    sys.stdout.reconfigure(errors="backslashreplace")  # messages of a user's reward function may contain anything
    faulthandler.enable()
    if "RANK" in os.environ:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when its torchrun is killed (Linux)
    code = 0
    name = f"rank {launch.here().rank}"
    try:
        joined = join()
        name = joined.name
        stops.watch(learns=not name.startswith("generator"))
        main(joined)
        if torch.distributed.is_initialized():  # vLLM's engine destroys it when it is collected
            torch.distributed.destroy_process_group()
        stops.end_well()
    except Stopped as stopped:
        if str(stopped):
            print(stopped, file=sys.stderr, flush=True)
        stops.end_well(stopped=True)
    except UserError as error:
        fail(error, name)
    except Exception as error:
        if device.is_out_of_memory(error):
            fail(UserError(_out_of_memory(error)), name)
        code = 0 if stops.stop_requested() and stops.learners_left() else 1
        if code:
            _explain(name, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: on failure no destructor may wait for a lost rank, and on success gloo's threads sometimes abort at the
    # interpreter's end
    os._exit(code)


def fail(error: UserError, name: str = "") -> NoReturn:
    """End this process with exit code 1 and the message, which one rank of each node prints. name: this rank's."""
    text = masked(str(error))
    stops.report(f"error: {text}", f"{name or f'rank {launch.here().rank}'} on {platform.node()} failed: {text}")
    sys.stdout.flush()
    os._exit(1)


def _explain(name: str, error: Exception) -> None:
    """Print the error: in full if it is the job's first failure, else its cause as one line on each node."""
    lost = stops.lost_connection(error)
    text = f"{type(error).__name__}: {error}"
    if cause := stops.cause(wait=stops.CAUSE_SECONDS if lost else 0):
        stops.report(f"{name} stops: {cause}", cause)
    elif lost:
        what = f"{name} failed: it lost its connection to another rank, which has left no message here ({text})"
        stops.report(what, what)
    elif stops.record(f"{name} on {platform.node()} failed: {text}")[0]:
        print(printable(f"{name} failed:\n{''.join(traceback.format_exception(error))}"), end="", file=sys.stderr, flush=True)


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
