"""Started by test_nodes.py with one torchrun per node: ranks of the second node fail in the way that the argument names, while
the first node's ranks wait for them.

    torchrun --nnodes 2 ... node_failures.py refused | killed
    torchrun --nnodes 2 --max-restarts 3 ... node_failures.py restarted DIRECTORY         twice, and then all is well
"""

import os
import signal
import sys
import time

from rl.errors import UserError
from rl.ranks import dist, launch, process


def restarted(ranks: dist.Ranks) -> None:
    print(f"start {launch.restarts()} of rank {ranks.rank}", flush=True)
    dist.barrier()
    if ranks.rank == 3 and launch.restarts() < 2:
        raise LookupError("not yet")
    dist.barrier()


def main(ranks: dist.Ranks) -> None:
    if sys.argv[1] == "restarted":
        return restarted(ranks)
    dist.barrier()
    print(f"rank {ranks.rank} is there", flush=True)
    if launch.here().first:  # the second node
        time.sleep(0.5)
        if sys.argv[1] == "refused":
            raise UserError("nothing is right here.\nNothing at all.")
        if sys.argv[1] == "killed":
            os.kill(os.getppid(), signal.SIGKILL)  # which takes the ranks along
        time.sleep(100)
    dist.barrier()


process.run(main, join=lambda: dist.init(60))
