"""Imported by every Python that quarter_hour.sh starts, because this folder is in its PYTHONPATH.

The `varlen_attn` of torch 2.11 has no `enable_gqa`; its kernel takes fewer heads of keys than of queries as they are. So the
word is dropped there. rl/model/attention_kernels.py asks before it passes it; forks and earlier checkouts do not.
"""

import importlib.machinery
import inspect
import sys

NAME = "torch.nn.attention.varlen"


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == NAME else None
        if spec:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), accept(module))
        return spec


def accept(module) -> None:
    plain = module.varlen_attn
    if "enable_gqa" not in inspect.signature(plain).parameters:
        module.varlen_attn = lambda *inputs, enable_gqa=False, **more: plain(*inputs, **more)


sys.meta_path.insert(0, Finder)
