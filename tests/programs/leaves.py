"""Two learners that have agreed to stop, and some generators: the second learner exits at once, the first one works a little
longer before its last line.

python tests/programs/leaves.py FILE_THAT_TELLS_IT_IS_READY GENERATORS
"""

import sys
import time
from pathlib import Path

from rl import split
from rl.errors import Stopped
from rl.ranks import dist, process, stops

stops.SECONDS = 600  # so that a rank that does not leave by itself is killed by torchrun, which says so
ready, generators = Path(sys.argv[1]), int(sys.argv[2])


def main(joined: dist.Ranks | split.Split) -> None:
    if generators and joined.role == "generator":
        time.sleep(600)
    ranks = joined.ranks if generators else joined
    stops.begin_training()
    if ranks.is_main:
        ready.touch()
    while not dist.stopping():
        time.sleep(0.05)
    if ranks.is_main:
        time.sleep(2)
    raise Stopped("all is done" if ranks.is_main else "")


process.run(main, join=(lambda: split.init_split(generators)) if generators else dist.init)
