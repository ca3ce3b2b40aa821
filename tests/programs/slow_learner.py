"""Runs a script whose learners load their model slowly, as large models do. The other ranks wait for them in C++.

python tests/programs/slow_learner.py SECONDS train_async.py --generators 1
"""

import runpy
import sys
import time

from rl.learning.learner import Learner

load = Learner.__init__


def load_slowly(*arguments, **keywords):
    print("loading", flush=True)
    time.sleep(float(seconds))
    load(*arguments, **keywords)


_, seconds, *sys.argv = sys.argv
Learner.__init__ = load_slowly
runpy.run_path(sys.argv[0], run_name="__main__")
