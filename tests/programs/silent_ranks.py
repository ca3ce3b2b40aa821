"""Started by test_heartbeat.py with one torchrun per node: processes are stopped while all ranks wait for each other, and
continue after the other node has ended.

    torchrun --nnodes 2 ... silent_ranks.py rank 3        that rank
    torchrun --nnodes 2 ... silent_ranks.py node 1        torchrun and its ranks on the second node
"""

import os
import subprocess
import sys
import time

from rl.ranks import dist, launch, process

TIMEOUT = 4.0  # --node-timeout
SCRIPT = """
sleep 0.5; kill -STOP {stopped}
n=0; while kill -0 {other} 2>/dev/null && [ $n -lt 350 ]; do sleep 0.1; n=$((n + 1)); done
[ $n -lt 350 ] && echo the other node has ended
kill -CONT {stopped} 2>/dev/null
"""


def main(ranks: dist.Ranks) -> None:
    kind, number = sys.argv[1], int(sys.argv[2])
    torchruns = [int(pid) for pid in dist.all_gather_bytes(str(os.getppid()).encode())]
    own = range(2, 4) if launch.here().first else range(2)
    if ranks.rank == (number if kind == "rank" else 2 * number):
        stopped = [os.getpid()] if kind == "rank" else [os.getppid(), *launch.neighbours().values()]
        (other,) = {*torchruns} - {os.getppid()}
        assert set(launch.neighbours()) == {*own}
        script = SCRIPT.format(stopped=" ".join(map(str, stopped)), other=other)
        subprocess.Popen(["sh", "-c", script], start_new_session=True)
        time.sleep(1000)
    dist.barrier()


process.run(main, join=lambda: dist.init(node_timeout=TIMEOUT))
