"""Counts the bytes that tensors hold, by cause: every storage is counted when it is made, resized and freed.

Works on real and on fake tensors (tools/plan/fake_device.py), so that the count itself can be checked on real ones. Left out:
memory that an operator takes and returns during its call, and the rounding of an allocator.
"""

import functools
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl.ranks.device import is_accelerator
from tools.plan.fake_device import of_no_tensor

# Where a storage was made -> its cause: the innermost of these functions on the stack decides. Keys are the end of a file's
# path and a function's name, or None for all functions.
CAUSES = [
    ("rl/model/log_probs.py", None, "logits"),
    ("rl/model/policy.py", "log_probs_at", "logits"),
    ("rl/model/policy.py", "top_tokens", "logits"),
    ("rl/model/policy.py", "of_part", "logits"),  # of both, also when it is computed again
    ("rl/learning/learner.py", "weights", "publish"),
    ("rl/weights/publish.py", None, "publish"),
    ("tools/plan/dry_run.py", "_checkpoint_copy", "checkpoint"),
    ("rl/data/image_prompts.py", None, "images"),
    ("rl/model/vision_forward.py", "language_inputs", "images"),  # including the tower, in the forward pass
    ("_fully_shard/_fsdp_collectives.py", "foreach_reduce", "gradients"),
    ("_fully_shard/_fsdp_collectives.py", "foreach_all_gather", "gathered layers"),
    ("_fully_shard/_fsdp_collectives.py", "foreach_all_gather_copy_out", "gathered layers"),
    ("_fully_shard/_fsdp_param.py", None, "gathered layers"),
    ("torch/nn/utils/clip_grad.py", None, "gradients"),
    ("rl/learning/learner.py", "make_optimizer", "optimizer"),
    ("rl/learning/learner.py", "moments", "optimizer"),
    ("rl/learning/compact_adamw.py", None, "optimizer"),
    ("torch/optim/", None, "optimizer"),
]
LOADING = "load_policy"  # makes the weights of the policy, the reference, the teacher and the critic: its `role`
OTHER = "activations"
PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor}


@dataclass
class Ledger:
    """The storages on one side, device or host, in bytes."""

    live: Counter = field(default_factory=Counter)  # by cause
    peak: int = 0
    at_peak: Counter = field(default_factory=Counter)  # by cause

    def add(self, cause: str, size: int) -> None:
        self.live[cause] += size
        if (total := sum(self.live.values())) > self.peak:
            self.peak = total
            self.at_peak = +self.live


class MemoryCount(TorchDispatchMode):
    """A context that counts the storages made within it, on the device and in host memory."""

    def __init__(self, vocabulary: int = 0, shapes: set[torch.Size] | None = None):
        """vocabulary, shapes: of the model's logits and parameters; they identify the logits and gradients of a backward pass,
        which no Python function makes."""
        super().__init__()
        self.device, self.host = Ledger(), Ledger()
        self.vocabulary = vocabulary
        self.shapes = shapes or set()
        self._sizes: dict[int, tuple[weakref.ref, Ledger, str, int]] = {}

    def __enter__(self):
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage, size):
            out = resize(storage, size)
            self._note_size(storage)
            return out

        torch.UntypedStorage.resize_ = resized  # FSDP frees and takes a layer's gathered weights this way
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not PLAIN.issuperset(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if of_no_tensor():
            return out
        for tensor in tree_leaves(out):
            if type(tensor) in PLAIN and tensor.layout is torch.strided and (tensor.device.type != "meta"):
                self.note(tensor)
        return out

    def note(self, tensor: torch.Tensor, cause: str = "") -> None:
        """Counts the tensor's storage, if it is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        ledger = self.device if is_accelerator(tensor.device) else self.host
        cause = cause or self._cause(tensor)
        size = storage.nbytes()
        self._sizes[key] = (weakref.ref(storage, functools.partial(self._gone, key)), ledger, cause, size)
        ledger.add(cause, size)

    def _note_size(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            reference, ledger, cause, before = self._sizes[storage._cdata]
            self._sizes[storage._cdata] = (reference, ledger, cause, storage.nbytes())
            ledger.add(cause, storage.nbytes() - before)

    def _gone(self, key: int, _) -> None:
        _, ledger, cause, size = self._sizes.pop(key)
        ledger.add(cause, -size)

    def _cause(self, tensor: torch.Tensor) -> str:
        frame = sys._getframe(2)
        while frame:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if name == LOADING:
                role = frame.f_locals["role"]
                return "weights" if role == "policy" else role
            for end, function, cause in CAUSES:
                if (file.endswith(end) or (end.endswith("/") and end in file)) and function in (None, name):
                    return "gradients" if cause == "logits" and tensor.shape in self.shapes else cause  # the head's own
            frame = frame.f_back
        if tensor.shape in self.shapes:
            return "gradients"
        return "logits" if tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary else OTHER
