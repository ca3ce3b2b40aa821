"""The life of a rank's process: what its end says, and with which exit code."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed

from rl import dist, watchdog
from rl.errors import Stopped, UserError
from rl.signals import stop_requested


def run(main: Callable[[dist.Ranks | dist.Split], None], join: Callable[[], dist.Ranks | dist.Split] = dist.init) -> None:
    """Runs a script's main on this rank and ends the process. The first rank that fails says why: a UserError in one
    message, anything else with its traceback; exit code 1. torchrun then ends the other ranks. Exit code 143 after SIGTERM.
    A crash in native code leaves every thread's Python stack."""
    faulthandler.enable()
    code, name = 0, f"rank {os.environ.get('RANK', 0)}"
    try:
        if "RANK" in os.environ:
            _die_with_parent()
        joined = join()
        name = joined.name
        main(joined)
        with watchdog.doing("all ranks to end"):
            if torch.distributed.is_initialized():  # vLLM's engine destroys it when the garbage collector meets the engine
                torch.distributed.destroy_process_group()
        watchdog.finish()
    except KeyboardInterrupt:
        code = 130
    except Stopped as stopped:
        code = 128 + signal.SIGTERM
        if str(stopped):
            print(stopped, file=sys.stderr, flush=True)
    except UserError as error:
        fail(error)
    except Exception as error:
        code = 1
        if stop_requested():  # the others have left already
            os._exit(128 + signal.SIGTERM)
        if "onnection" in str(error):  # torchrun knows who went and why, and ends this rank before it can say less
            time.sleep(5)
        if _first_to_fail():
            print(f"{name} failed:", file=sys.stderr)
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: on failure no destructor may wait for a rank that will never come, and on success gloo's threads now and
    # then abort while the interpreter takes itself apart.
    os._exit(code)


def fail(error: UserError) -> NoReturn:
    """Ends this process with exit code 1 and the message, which the job's first rank to fail prints."""
    if _first_to_fail():
        print(f"error: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _die_with_parent() -> None:
    """A torchrun that is killed takes its ranks along (Linux), from here on and if it was killed before."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        with open("/proc/1/cmdline", "rb") as file:
            launcher = file.read()
        if os.getppid() == 1 and b"python" not in launcher and b"torch" not in launcher:  # of a container, that may be 1
            os._exit(1)


def _first_to_fail() -> bool:
    """Whether no other rank of the job has failed before: what breaks in its wake would only bury the cause."""
    try:
        return dist.open_store(timedelta(seconds=5)).add(watchdog.FAILED, 1) == 1
    except Exception:  # the store is gone, and with it whoever could have said more
        return True
