import os

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # rl/ranks/failures.py says in a line what torch warns of in frames of C++

__version__ = "0.1.0"
