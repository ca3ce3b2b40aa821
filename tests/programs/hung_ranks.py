"""Started by test_failures.py: ranks that hang on purpose.

torchrun ... hung_ranks.py FILE      rank 1 does not come to a collective in which rank 0 waits
python hung_ranks.py                 a process that gets on slowly, and then no more
"""

import os
import sys
import time
from pathlib import Path

import torch

from rl.ranks import dist, process, watchdog


def main(ranks: dist.Ranks) -> None:
    if ranks.world_size == 1:
        for i in range(4):
            print(f"got on {i + 1} times", flush=True)
            watchdog.progress()
            time.sleep(1)
        while True:
            torch.ones(1).add(1)
    dist.barrier()  # then only a hang takes long, however busy the machine is
    if ranks.rank == 1:
        Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(1e6)
    watchdog.start(3)
    dist.barrier()


process.run(main, lambda: dist.init(2 if "RANK" not in os.environ else 0))
