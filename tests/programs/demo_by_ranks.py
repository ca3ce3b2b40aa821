"""A job of two ranks that makes demo models; nothing is taught.

own DIRECTORY            each rank has a cache of its own, as on a node of its own, and makes all models in it
late SCRIPT FLAGS ...    both ranks train in one cache; the first rank asks for the model when the second one has made it
"""

import os
import runpy
import sys
import time
from pathlib import Path

import torch

from examples.demo import VERSIONS, calculator, directory, pictures
from examples.demo import sums as demo

how, *arguments = sys.argv[1:]
rank = int(os.environ["RANK"])
demo._teach = calculator._teach = pictures._teach = lambda *_: None

if how == "own":
    torch.distributed.init_process_group("gloo")
    os.environ["RL_CACHE"] = f"{arguments[0]}/{rank}"
    for name in VERSIONS:
        demo.model_dir(name)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
else:
    made_once = demo.made_once

    def late(name, make):
        while rank == 0 and not directory(name).exists():
            time.sleep(0.05)
        return made_once(name, make)

    demo.made_once = late
    sys.argv = arguments
    runpy.run_path(str(Path(arguments[0]).resolve()), run_name="__main__")
