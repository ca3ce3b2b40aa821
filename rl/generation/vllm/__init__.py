"""The engine over vLLM, and what vLLM reads when it is imported or started."""

import logging
import os
import warnings

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process, where `step` drives it
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# GiB; otherwise a CPU engine takes --gpu-memory-utilization of the host's memory
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# multiprocessing's own process would warn of shared memory that a rank's end frees
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # would warn that a CPU has no Triton
