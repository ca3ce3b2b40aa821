import os

# What torch warns of in frames of C++, rl/ranks/failures.py says in a line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

__version__ = "0.1.0"
