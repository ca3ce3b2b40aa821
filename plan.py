"""A run's memory and time, told before it is started: on a laptop, of any number of ranks, without its weights.

    python plan.py train_async.py --model Qwen/Qwen2.5-7B-Instruct --generators 4 --dtype bfloat16 --gradient-checkpointing \\
        --max-prompt-length 1024 --max-response-length 8192 --ppo-max-token-len-per-gpu 16384 \\
        --nnodes 2 --nproc-per-node 8 --device H100-80GB --response-lengths 2000:0.9

After the script's name stand the flags that it will be started with, and those of the plan. Memory: the learner's own code
runs on tensors without values (rl/plan/dry_run.py), and what it holds at its peak is counted. Time: the run's schedule on a
simulated clock (rl/plan/time_plan.py). docs/plan.md says what each can tell. Of the model only config.json is read.
"""

import importlib
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated

from rl import flags, process
from rl.errors import UserError
from rl.plan.choices import SCRIPTS, Machine
from rl.plan.devices import device
from rl.plan.memory_plan import plan_memory
from rl.plan.time_plan import TimeArgs, plan_time
from rl.ranges import Range


@dataclass
class PlanArgs(TimeArgs):
    """The machines that the run is planned for."""

    nnodes: Annotated[int, Range(at_least=1)] = 1
    """Machines of the job."""
    nproc_per_node: Annotated[int, Range(at_least=1)] = 1
    """Ranks of each, one a device."""
    device: str | None = None
    """Kind of the devices (rl/plan/devices.py). Without one there is no plan of the memory."""
    response_lengths: str = "budget"
    """Tokens of the responses: budget (all of --max-response-length), a mean, a mean and the spread of the logarithm
    (2000:0.9), or the directory of a run of this project whose lengths are taken."""
    image_size: str | None = None
    """Images of each prompt, for a model that takes some: a size in pixels such as 1000x800, with their number 1000x800x2, or
    data: those of --train-files, by their headers."""


def main(words: list[str]) -> None:
    """words: the command line. Raises UserError for what cannot be planned."""
    if words in (["--help"], ["-h"]):
        print(f"{__doc__}\nThe flags: python plan.py {SCRIPTS[0]}.py --help, and so for each script.")
        return
    name = Path(words[0]).stem if words else ""
    if name not in SCRIPTS:
        raise UserError(
            f"python plan.py {' '.join(words[:1])}: name one of {', '.join(f'{s}.py' for s in SCRIPTS)}, then its flags."
        )
    script = importlib.import_module(name)
    both = make_dataclass("Args", [], bases=(PlanArgs, script.Args))
    planned = any(word.partition("=")[0] == "--device" for word in words)  # on which --dtype auto is another than here
    args = flags.read(both, __doc__, words[1:], {"dtype": "bfloat16"} if planned else None)
    machine, kind = Machine(args.nnodes, args.nproc_per_node), args.device and device(args.device)
    if kind:
        plan_memory(name, args, machine, args.response_lengths, kind, args.image_size)
    plan_time(name, args, args, machine, args.response_lengths, kind)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        process.fail(error)
