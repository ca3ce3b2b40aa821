"""AdamW whose moments are in host memory, in 8 bits, or both. Only imported with --optimizer-offload or --optim adamw_8bit.

The step itself is torch's fused AdamW in fp32 on the device, one piece of a parameter at a time. The piece's moments are copied
to the device and back. Offloading changes no bit of the result; 8 bits do.

In 8 bits each block of 256 neighbours in a row has an fp32 scale, and each element is one of 256 values, which are denser near
0 (dynamic tree quantization, arXiv 2110.02861). The second moment is stored as its root: stored directly, small ones would
become 0 next to first moments that do not, and AdamW divides one by the root of the other. A block never crosses a row and FSDP
never cuts a row, so a checkpoint fits any number of learners to the bit. torchao's blocks depend on what a rank holds, its step
must be compiled and its offload knows only CUDA and XPU; bitsandbytes needs CUDA.
"""

import functools
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw

from rl.ranks.device import is_accelerator
from rl.ranks.shards import local

PIECE = 1 << 24  # elements of a step: 64 MB of each moment
BLOCK = 256  # elements that share a scale
NARROW = 64  # shorter rows and one-dimensional parameters stay in fp32: they are few
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether the moment has a sign
TINY = torch.finfo(torch.float32).tiny


class CompactAdamW(torch.optim.Optimizer):
    """AdamW of one group of parameters in fp32. A parameter's state is "step", and for both moments, "exp_avg" and
    "exp_avg_sq", fp32 values, or codes in 8 bits next to an fp32 "..._scale" of each block. All but "step" are sharded as the
    parameter is."""

    def __init__(self, parameters: Iterable, on_host: bool, in_8_bits: bool, **knobs):
        """knobs: lr, betas and weight_decay."""
        super().__init__(parameters, {"eps": 1e-8} | knobs)
        self.on_host = on_host
        self.in_8_bits = in_8_bits
        self._pinned = PinnedBlocks()

    def begin(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the parameter's state, created on first use."""
        state = self.state[parameter]
        if state:
            return state
        value = parameter.data
        state["step"] = torch.zeros((), device=parameter.device)
        for name in MOMENTS:
            if self.in_8_bits and value.dim() > 1 and value.shape[-1] >= NARROW:
                state[name] = self._zeros(value, torch.uint8)
                state[f"{name}_scale"] = self._zeros(value[..., ::BLOCK], torch.float32)
            else:
                state[name] = self._zeros(value, torch.float32)
        return state

    @torch.no_grad()
    def _zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return contiguous zeros, sharded as `like` is; with `on_host` in host memory, pinned next to an accelerator."""
        # A slice of one element counts as contiguous whatever its stride, and zeros like it would keep that stride.
        place = {"dtype": dtype, "memory_format": torch.contiguous_format} | ({"device": "cpu"} if self.on_host else {})
        if not (self.on_host and is_accelerator(like.device)):
            return torch.zeros_like(like, **place)
        made = torch.empty_like(like, **place)
        own = local(made)
        own.set_(self._pinned.zeros(own.numel(), dtype).view(own.shape))
        return made

    @torch.no_grad()
    def step(self) -> None:
        """Take a step with every parameter that has a gradient."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self._step(parameter)
        device = self.param_groups[0]["params"][0].device
        if self.on_host and is_accelerator(device):  # the host may read what it is sent
            torch.accelerator.current_stream(device).synchronize()

    def _step(self, parameter: torch.nn.Parameter) -> None:
        state = self.begin(parameter)
        value, grad = local(parameter.data), local(parameter.grad)
        kept = {name: local(tensor) for name, tensor in state.items() if name != "step"}
        if not value.dim():  # a scalar has no rows
            value, grad = value.view(1), grad.view(1)
            kept = {name: tensor.view(1) for name, tensor in kept.items()}
        for rows in _pieces(value):
            self._step_rows(value[rows], grad[rows], state["step"].clone(), {name: t[rows] for name, t in kept.items()})
        state["step"] += 1

    def _step_rows(self, value: torch.Tensor, grad: torch.Tensor, step: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
        """value, grad: on the device; step: a copy of the count of steps; kept: the state of these rows."""
        group = self.param_groups[0]
        came = {name: tensor.to(value.device, non_blocking=True) for name, tensor in kept.items()}
        moments = [_decoded(name, came) for name in MOMENTS]
        knobs = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        knobs |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "amsgrad": False, "maximize": False, "fused": True}
        of_step = ([value], [grad], *([moment] for moment in moments))
        adamw(*of_step, max_exp_avg_sqs=[], state_steps=[step], **knobs)  # torch's own, in place
        for name, moment in zip(MOMENTS, moments, strict=True):
            if f"{name}_scale" in kept:
                moment, scale = to_8_bits(moment if MOMENTS[name] else moment.sqrt_(), table(MOMENTS[name], moment.device))
                kept[f"{name}_scale"].copy_(scale, non_blocking=True)
            kept[name].copy_(moment, non_blocking=True)


def _decoded(name: str, came: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a moment in fp32: the tensor itself if it already is."""
    moment = came[name]
    if (scale := came.get(f"{name}_scale")) is None:
        return moment
    moment = from_8_bits(moment, scale, table(MOMENTS[name], moment.device))
    return moment if MOMENTS[name] else moment.square_()


def _pieces(value: torch.Tensor) -> Iterator[slice]:
    """Divide rows into runs of at most PIECE elements, or 16 rows."""
    if not value.numel():
        return
    # Multiples of 16 rows, so that the fused step vectorises each piece as it does the whole.
    rows = max(16, PIECE // (value.numel() // len(value)) // 16 * 16)
    yield from (slice(start, start + rows) for start in range(0, len(value), rows))


# ------------------------------------------------------------------------------------------------------------- 8 bits


@functools.cache
def table(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 values of a code, ascending, from -1 or 0 to 1: 0, 1, and in each of seven decades below 1 the middles of
    equally long parts, twice as many as in the next lower decade."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        middles = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0 ** (decade - 6) for i in range(parts)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values), device=device)


def to_8_bits(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode x [..., C]: return (codes [..., C] uint8, the index of the nearest value; scale [..., C / 256 rounded up] fp32,
    the largest magnitude of each block)."""
    blocks = _blocks(x)  # [..., C / 256, 256]
    scale = blocks.abs().amax(-1)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scale.clamp(min=TINY)[..., None], between, out_int32=True)
    return codes.to(torch.uint8).flatten(-2)[..., : x.shape[-1]], scale


def from_8_bits(codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Decode codes [..., C] with their blocks' scales [..., C / 256 rounded up]: return values [..., C]."""
    values = table[_blocks(codes).int()] * scale[..., None]
    return values.flatten(-2)[..., : codes.shape[-1]].contiguous()


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """Reshape [..., C] to [..., C / 256 rounded up, 256], padded with zeros."""
    missing = -x.shape[-1] % BLOCK
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, BLOCK))


# ----------------------------------------------------------------------------------------------------- pinned memory

PINNED_BLOCK = 1 << 30  # most bytes allocated at once for small tensors
LEAST = 1 << 20  # smallest tensor, in bytes, that is cut out of such a block
ALIGN = 512  # bytes to which a tensor's start in a block is aligned, as torch aligns device tensors


class PinnedBlocks:
    """Pinned memory for tensors that stay for the whole run, cut out of blocks. For each pinned tensor torch allocates the next
    power of two of bytes, a third more than a matrix of 192 MB needs; a block has such a size itself."""

    def __init__(self):
        self._taken = 0  # bytes
        self._rest: list[torch.Tensor] = []  # the free part of each block

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [count] zeros in pinned memory."""
        size = count * dtype.itemsize
        room = -(-size // ALIGN) * ALIGN
        if size < LEAST:
            return _pinned(size).view(dtype)
        number = next((number for number, rest in enumerate(self._rest) if len(rest) >= room), None)
        if number is None:
            number = len(self._rest)
            self._rest.append(_pinned(1 << (max(room, min(PINNED_BLOCK, self._taken)) - 1).bit_length()))
        found, self._rest[number] = self._rest[number][:size], self._rest[number][room:]
        self._taken += room
        return found.view(dtype)


def _pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
