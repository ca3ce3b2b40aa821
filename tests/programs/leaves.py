"""Two ranks that have agreed to stop: the second one goes at once, the first has something left to do before its last line."""

import sys
import time
from pathlib import Path

from rl import dist, process
from rl.errors import Stopped


def main(ranks: dist.Ranks) -> None:
    if ranks.is_main:
        Path(sys.argv[1]).touch()
    while not dist.stopping():
        time.sleep(0.05)
    if ranks.is_main:
        time.sleep(2)
    raise Stopped("all is done" if ranks.is_main else "")


process.run(main)
