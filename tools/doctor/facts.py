"""A program that prints torch's facts about this machine, as one line of JSON. A broken torch ends this process, not the
doctor."""

import json
import os
import sys


def main() -> None:
    import torch

    from rl.ranks import device

    kind = device.kind()
    module = getattr(torch, kind, None)
    facts = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "kind": kind,
        "device": device.name(),
        "devices": torch.accelerator.device_count() if kind != "cpu" else 0,
        "peak_flops": device.peak_flops(),
        "cuda": torch.version.cuda,
        "cann": getattr(torch.version, "cann", None),  # set by torch-npu
        "cudnn": torch.backends.cudnn.version() if kind == "cuda" else None,
        "memory_gb": module.get_device_properties(0).total_memory / 2**30 if kind != "cpu" else None,
        "RL_DEVICE": os.environ.get("RL_DEVICE"),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
