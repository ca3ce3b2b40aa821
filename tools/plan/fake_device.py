"""A fake accelerator: our own code runs on it, every shape and device is checked, and nothing is computed.

Tensors on the fake device are PyTorch's FakeTensors. The host stays real: packing, advantages and the schedule of a batch are
computed, and a tensor left on the host by mistake raises when it meets one on the device, as it would on the machine. Values
read back from the device are zeros, except integers that came from the host (tools/plan/known_values.py).

    ranks = start(16)               # once, in a process of its own: it renames a device for good
    with FakeDevice():
        learner = Learner(path, args, ranks, ...)

The device is called "npu", because PyTorch allows that name for a new device and gives it autograd and FSDP. (A fake "cuda"
tensor in a build without CUDA has no gradients and cannot be sliced.) For CUDA it gets CUDA's attention
(tools/plan/fake_kernels.py). Left out: time and values, the host memory of allocators and collectives, and what a device lacks,
which the tests' own refuses.
"""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from rl.learning.learner import Learner
from rl.model import expert_parallel
from rl.ranks import device
from rl.ranks import dist as ranks_dist
from rl.ranks.device import is_accelerator
from rl.ranks.dist import Ranks
from rl.weights import publish
from tools.plan import known_values
from tools.plan.fake_kernels import define_cuda_kernels, define_npu_kernels

aten = torch.ops.aten
KIND = "npu"
# What torch.accelerator asks an allocator of torch's own kind; torch-npu 2.10's is not one.
ALLOCATOR_CALLS = ["empty_cache", "get_memory_info", "max_memory_allocated", "max_memory_reserved", "memory_allocated"]
ALLOCATOR_CALLS += ["memory_reserved", "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats"]


class _Idle(contextlib.nullcontext):
    """A queue of work on the device that is always empty, or an event that has always happened."""

    def __init__(self, *_, **__): ...

    def __getattr__(self, name: str):
        return lambda *_, **__: self


NPU = SimpleNamespace(  # what PyTorch asks of torch.npu
    Stream=_Idle,
    Event=_Idle,
    is_initialized=lambda: True,
    is_available=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: 1,
    current_stream=_Idle,
    stream=_Idle,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    get_device_name=lambda _device=None: "fake",
    mem_get_info=lambda _device=None: (2**36, 2**36),
    **dict.fromkeys((*ALLOCATOR_CALLS, "manual_seed_all", "current_device", "set_device", "synchronize"), lambda *_: 0),
)


def start(world_size: int = 1, attention: str = KIND, made: "Callable[[], FakeDevice] | None" = None) -> Ranks:
    """Register the device, and make this process the first of `ranks` ranks, whose collectives return at once. Call once per
    process. attention: the kind of device to imitate. made: makes the device of the thread that sends weights. Experts are
    computed as grouped products, because sizes of single experts would depend on values. Tokens are assumed to be spread evenly
    over experts."""
    (define_npu_kernels if attention == KIND else define_cuda_kernels)()
    device.PACKED_ATTENTION[KIND] = device.PACKED_ATTENTION[attention]
    device.DELTA_RULE.pop(KIND, None)  # Triton's kernels know no fake tensors
    device.LOOPED_EXPERTS.discard(KIND)
    expert_parallel.rows_to_trade = _even_rows
    clip = Learner.clip
    Learner.clip = lambda learner: clip(learner) or 1.0  # the norm reads 0, for which the optimizer takes no step
    import torch.distributed._tools.fake_collectives  # torch 2.10 and 2.11 know no fake collectives without it
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _fsdp_init._move_states_to_device = _move_states_to_device
    _setup_privateuseone_for_python_backend(KIND, backend_module=NPU)
    publish.side_stream = lambda device: (made or FakeDevice)()  # the thread that sends has to enter it as well
    for name in (*ALLOCATOR_CALLS, "synchronize"):
        setattr(torch.accelerator, name, lambda *_: 0)
    torch.accelerator.current_stream = _Idle
    ranks_dist.broadcast_parts = _same_parts
    torch.distributed.Backend.backend_capability["fake"].append(KIND)
    torch.distributed.init_process_group(f"cpu:fake,{KIND}:fake", rank=0, world_size=world_size, store=FakeStore())
    return Ranks(0, world_size, 0, torch.device(KIND, 0))


def _same_parts(parts: list[bytearray], _group) -> None:
    """Replaces rl.ranks.dist.broadcast_parts: the other ranks send what this one, the first, does."""
    for part in parts:
        part[:] = parts[0]


def _even_rows(count: torch.Tensor, rows: int, group) -> tuple[torch.Tensor, list[int], list[int]]:
    """Replaces rl.model.expert_parallel.rows_to_trade."""
    sent = _even(rows, group.size())
    received = [sent[group.rank()]] * group.size()
    arriving = [n for from_rank in received for n in _even(from_rank, len(count) // group.size())]
    return torch.tensor(arriving).to(count.device), sent, received


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _move_states_to_device(params, buffers, device: torch.device) -> None:
    """FSDP's own sets `tensor.data`, which a real tensor cannot do with a fake one."""
    for tensor in (*params, *buffers):
        if tensor.device.type not in (device.type, "meta"):
            with torch.no_grad():
                moved = tensor.to(device)
            moved.requires_grad_(tensor.requires_grad)
            moved._is_param = isinstance(tensor, torch.nn.Parameter)
            moved.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()  # of references, which would interfere
            torch.utils.swap_tensors(tensor, moved)


class FakeDevice(TorchDispatchMode):
    """A context in which tensors on the device are fake, for one thread."""

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode()
        self._host_too = False

    def __enter__(self):
        self._lifted_before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is then seen on its way to the device
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self._lifted_before)
        return super().__exit__(*error)

    def host_too(self, yes: bool = True):
        """A context in which tensors made in host memory are fake as well, and so is everything computed from them later."""
        return patch.object(self, "_host_too", yes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not OWN.issuperset(types):
            return NotImplemented  # DTensors and similar return with the tensors that they hold
        if of_no_tensor():
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        fakes = sum(isinstance(x, FakeTensor) for x in tensors)
        if func in PINNING:
            return PINNING[func](*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if not fakes and not self._makes_fake(tensors, kwargs):
            return func(*args, **kwargs)
        written = [x for x in self._mutated(func, args, kwargs) if not isinstance(x, FakeTensor)]
        if fakes < len(tensors) and written:
            return self._into_host(func, args, kwargs, tensors)
        known = known_values.computed(func, args, kwargs)
        if known is None and func in READ:
            return READ[func](*args, **kwargs)
        if known is not None and VALUES_TELL.intersection(func.tags):
            if len({x.device for x in tensors}) > 1 and func is not aten.index.Tensor:
                raise _different_devices(func, tensors[0].device, tensors[-1].device)
            return tree_map_only(torch.Tensor, lambda x: self._known_stand_in(x, tensors[0].device), known)
        if func is aten.index.Tensor:
            args = (args[0], [place for index in args[1] for place in self._places(index)])
        if fakes < len(tensors):
            args, kwargs = tree_map_only(torch.Tensor, self._stand_in, (args, kwargs))
        if func.namespace in ("torch_attn", KIND) and len({x.device for x in tensors}) > 1:  # whose fakes do not look
            raise _different_devices(func, tensors[0].device, tensors[-1].device)
        with self.fake:
            if func is aten._grouped_mm.default and args[0].dtype == torch.float32:  # computed, but its fake knows bf16 only
                args = tree_map_only(torch.Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, args)
                return func(*args, **kwargs).float()
            out = func(*args, **kwargs)
        self._keep_in_mind(func, args, kwargs, out, known)
        return out

    def _keep_in_mind(self, func, args, kwargs, out, known) -> None:
        """Update which integers on the device have known values."""
        if known is None:
            is_collective = func.namespace == "c10d"  # not all of them declare what they write into
            for x in tree_leaves((args, kwargs)) if is_collective else self._mutated(func, args, kwargs):
                known_values.forget(x)
            return
        for x, value in zip(tree_leaves(out), tree_leaves(known), strict=True):
            if isinstance(x, FakeTensor):
                known_values.remember(x, value)

    def _known_stand_in(self, x: torch.Tensor, where: torch.device) -> FakeTensor:
        out = self._stand_in(x, where)
        known_values.remember(out, x)
        return out

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Replace a known mask in an index by its positions, one tensor per dimension: their number depends on values."""
        places = known_values.chosen(index)
        return [index] if places is None else [self._known_stand_in(place, index.device) for place in places]

    def _stand_in(self, x: torch.Tensor, where: torch.device | None = None) -> FakeTensor:
        """Return a fake of a real tensor, for an operator that involves the device."""
        if isinstance(x, FakeTensor):
            return x
        with self.fake:
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=where or x.device)

    def _into_host(self, func, args, kwargs, tensors: list[torch.Tensor]):
        """Write a result of the device into a real tensor."""
        for x in tensors:
            if is_accelerator(x.device) and func not in COPIES:
                raise _different_devices(func, torch.device("cpu"), x.device)
        args, kwargs = tree_map_only(FakeTensor, _forgotten, (args, kwargs))
        return func(*args, **kwargs)

    def _makes_fake(self, tensors: list[torch.Tensor], kwargs: dict) -> bool:
        if kwargs.get("device") is None:
            return self._host_too and not tensors
        where = torch.device(kwargs["device"])
        return where.type == KIND or (self._host_too and not is_accelerator(where))

    @staticmethod
    def _mutated(func, args, kwargs) -> list[torch.Tensor]:
        """Return the tensors that an operator writes into."""
        out = []
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                out += [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        return out


OWN = {torch.Tensor, torch.nn.Parameter, FakeTensor}
COPIES = {aten.copy_.default, aten._foreach_copy_.default}
PINNING = {
    aten.is_pinned.default: lambda x, device=None: not is_accelerator(x.device),
    aten._pin_memory.default: lambda x, device=None: x.clone(),
}


VALUES_TELL = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}  # shapes, or what an operator returns
READ = {  # depends on values that are not known
    aten._local_scalar_dense.default: lambda x: torch.zeros((), dtype=x.dtype).item(),
    aten.bincount.default: lambda x, weights=None, minlength=0: x.new_zeros(minlength),
}


def _different_devices(func, one: torch.device, other: torch.device) -> RuntimeError:
    """Return the error of an operator whose tensors are on two devices."""
    return RuntimeError(f"{func}: expected all tensors to be on the same device, but found {one} and {other}")


def of_no_tensor() -> bool:
    """Return True within another fake mode: DTensor uses one to find an operator's full shape, and nothing is held."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _forgotten(x: torch.Tensor) -> torch.Tensor:
    """Return what the host reads from the device."""
    known = known_values.values(x)
    return torch.zeros(x.shape, dtype=x.dtype) if known is None else known
