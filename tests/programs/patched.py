"""Runs a script after some statements, which make a part of it slow, or fail.

python tests/programs/patched.py 'import time' train_async.py --generators 1
"""

import runpy
import sys

_, statements, *sys.argv = sys.argv
exec(statements)
runpy.run_path(sys.argv[0], run_name="__main__")
