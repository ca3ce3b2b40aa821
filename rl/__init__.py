import os

# rl/ranks/process.py reports in a line what torch would warn of with frames of C++
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

__version__ = "0.1.0"
