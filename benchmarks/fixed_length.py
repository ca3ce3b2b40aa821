"""Runs a script whose responses are all --max-response-length long: end tokens do not end them.

python benchmarks/fixed_length.py train_sync.py FLAGS ...
"""

import dataclasses
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.argv = sys.argv[1:]

if __name__ == "__main__":
    from rl.generation.engine import SamplingArgs

    training = SamplingArgs.training.fget
    SamplingArgs.training = property(lambda args: dataclasses.replace(training(args), ignore_eos=True))
    runpy.run_path(sys.argv[0], run_name="__main__")
