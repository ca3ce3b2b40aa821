"""Predicts a run's memory and time before it starts: on a laptop, for any number of ranks, without the model's weights.

    python plan.py train_async.py --model Qwen/Qwen2.5-7B-Instruct --generators 4 --dtype bfloat16 --gradient-checkpointing \\
        --max-prompt-length 1024 --max-response-length 8192 --max-tokens-per-micro-batch 16384 \\
        --nnodes 2 --nproc-per-node 8 --device H100-80GB --response-lengths 2000:0.9

Give the script's name, then the flags of the run and those of the plan. To plan your own copy of a script, give its file: its
flags and its `learn` are planned. Memory: the learner's own code runs on tensors without values (tools/plan/dry_run.py), and
the bytes it holds at its peak are counted. Time: every mode and split of the ranks is simulated (tools/plan/time_plan.py).
docs/plan.md says how exact both are. Only the model's config.json is read.
"""

import importlib
import os
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

if __name__ == "__main__" and len(sys.argv) > 1 and Path(sys.argv[1]).is_file():
    sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))  # what is next to the script counts, its losses.py above all

from rl import flags
from rl.errors import UserError
from rl.ranges import Range
from rl.ranks import process
from rl.setup import CommonArgs
from tools.plan.devices import Machine, device
from tools.plan.memory_plan import MemoryPlan, plan_memory
from tools.plan.time_plan import plan_time
from user_processes.server import python_path

SCRIPTS = ("train_sync", "train_one_step_off", "train_async")


@dataclass
class PlanArgs:
    """The plan: machines, lengths, and where the time of each part comes from."""

    nnodes: Annotated[int, Range(at_least=1)] = 1
    """Machines of the job."""
    nproc_per_node: Annotated[int, Range(at_least=1)] = 1
    """Ranks on each machine, one per device."""
    device: str | None = None
    """Kind of the devices (tools/plan/devices.py). Memory is planned only if it is given."""
    from_run: str | None = None
    """Directory of a finished run of the same model on the same devices: its times replace the data sheet's."""
    response_lengths: str | None = None
    """Tokens of the responses: budget (all of --max-response-length), a mean, a mean and the spread of the logarithm
    (2000:0.9), or the directory of a run with such lengths. Default: budget, and for the time the lengths of --from-run."""
    image_size: str | None = None
    """Images of each prompt, for a model that takes images: a size in pixels such as 1000x800, a size and a number such as
    1000x800x2, or data: the images of --train-files, whose headers are read."""


def main(words: list[str]) -> None:
    """words: the command line. Raise UserError if it cannot be planned."""
    if words in (["--help"], ["-h"], ["--help-all"]):
        print(f"{__doc__}\nThe flags: python plan.py {SCRIPTS[0]}.py --help, and so for each script.")
        return
    name, script = load(words[0] if words else "")
    both = make_dataclass("Args", [], bases=(PlanArgs, script.Args))
    planned = any(word.partition("=")[0] == "--device" for word in words)  # on which --dtype auto is another than here
    args = flags.read(both, __doc__, words[1:], {"dtype": "bfloat16"} if planned else None)
    machine = Machine(args.nnodes, args.nproc_per_node)
    kind = args.device and device(args.device)
    if kind:
        plan_memory(MemoryPlan(name, args, machine, kind, args.response_lengths or "budget", args.image_size))
    plan_time(args, machine, args.response_lengths or args.from_run or "budget", kind, args.from_run)


def load(named: str) -> tuple[str, ModuleType]:
    """Return (import name, module) of a script, given by its name, or of a copy, given by its file. The processes that this one
    starts import it by the same name."""
    file = Path(named)
    name = Path(named).stem
    if name in SCRIPTS and not file.is_file():
        return name, importlib.import_module(name)
    of_three = f"one of {', '.join(f'{s}.py' for s in SCRIPTS)}, or the file of a copy"
    if not (file.suffix == ".py" and file.is_file()):
        raise UserError(f"python plan.py {named}: name {of_three}, then its flags.")
    directory = str(file.resolve().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = python_path(directory)
    try:
        script = importlib.import_module(name)
    except Exception as error:  # the user's code
        raise UserError(f"python plan.py {named}: it cannot be imported ({type(error).__name__}: {error}).") from error
    is_training = hasattr(script, "learn") and issubclass(getattr(script, "Args", object), CommonArgs)
    if not (is_training and Path(script.__file__).samefile(file)):
        raise UserError(f"python plan.py {named}: it is no training script with Args and learn. Name {of_three}.")
    return name, script


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        process.fail(error)
