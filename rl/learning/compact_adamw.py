"""AdamW with a smaller footprint: moments in host memory, in 8 bits, or both, and optionally bf16 gradients.

The step itself is torch's fused AdamW in fp32 on the device, one piece of a parameter at a time. The piece's moments are copied
to the device and back, and so are its fp32 weights if the device only has them in bf16 (rl/learning/masters.py). Offloading
changes no bit of the result; 8 bits do.

In 8 bits each block of 256 neighbours in a row has an fp32 scale, and each element is one of 256 values, which are denser near
0 (dynamic tree quantization, arXiv 2110.02861). The second moment is stored as its root: stored directly, small ones would
become 0 next to first moments that do not, and AdamW divides one by the root of the other. A block never crosses a row and FSDP
never cuts a row, so a checkpoint fits any number of learners to the bit. Blocks of torchao's and bitsandbytes' optimizers
depend on what a rank holds; torchao also compiles its step, and bitsandbytes needs CUDA.

An update moves 16 bytes a parameter between host and device, 4 in 8 bits, and 8 more for weights in fp32.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw

from rl.model.shards import local, zeros_on_host
from rl.ranks.device import PinnedBlocks, is_accelerator

PIECE = 1 << 24  # elements of a step: 64 MB of each moment
BLOCK = 256  # elements that share a scale
NARROW = 64  # shorter rows and one-dimensional parameters stay in fp32: they are few
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether the moment has a sign
MASTER = "master"
TINY = torch.finfo(torch.float32).tiny


class CompactAdamW(torch.optim.Optimizer):
    """AdamW of one group of parameters. A parameter's state is "step", and for both moments, "exp_avg" and "exp_avg_sq", fp32
    values, or codes in 8 bits next to an fp32 "..._scale" of each block. All but "step" are sharded as the parameter is."""

    def __init__(
        self,
        parameters: Iterable,
        lr: float,
        betas: tuple,
        weight_decay: float,
        on_host: bool,
        in_8_bits: bool,
        masters: dict[torch.nn.Parameter, torch.Tensor] | None = None,
    ):
        """masters: the fp32 weights of parameters in bf16, in host memory or on their device (rl/learning/masters.py)."""
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8})
        self.on_host = on_host
        self.in_8_bits = in_8_bits
        self.masters = masters or {}
        self._tables: dict[bool, torch.Tensor] = {}
        self._pinned = PinnedBlocks()

    def begin(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the parameter's state, created on first use."""
        if state := self.state[parameter]:
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

    def _zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.on_host:
            return zeros_on_host(like, dtype, self._pinned)
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)  # as in zeros_on_host

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
        kept = {name: local(tensor) for name, tensor in state.items() if name != "step"}
        if parameter in self.masters:
            kept[MASTER] = local(self.masters[parameter])
        value, grad = local(parameter.data), local(parameter.grad)
        if not value.dim():  # a scalar has no rows
            value = value.view(1)
            grad = grad.view(1)
            kept = {name: tensor.view(1) for name, tensor in kept.items()}
        for rows in _pieces(value):
            of_rows = {name: tensor[rows] for name, tensor in kept.items()}
            self._step_rows(value[rows], grad[rows], state["step"].clone(), of_rows)
        state["step"] += 1

    def _step_rows(self, value: torch.Tensor, grad: torch.Tensor, step: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
        """value, grad: on the device; step: a copy of the count of steps; kept: state, and fp32 weights if value is in bf16."""
        came = {name: tensor.to(value.device, non_blocking=True) for name, tensor in kept.items()}
        master = came.get(MASTER, value)
        moments = [self._decoded(name, came) for name in MOMENTS]
        group = self.param_groups[0]
        knobs = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        knobs |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "amsgrad": False, "maximize": False, "fused": True}
        of_step = ([grad.to(master.dtype)], *([moment] for moment in moments))
        adamw([master], *of_step, max_exp_avg_sqs=[], state_steps=[step], **knobs)  # torch's own, in place
        for name, moment in zip(MOMENTS, moments, strict=True):
            self._store(name, moment, kept)
        if MASTER in came:
            value.copy_(master)
            kept[MASTER].copy_(master, non_blocking=True)

    def _decoded(self, name: str, came: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a moment in fp32: the tensor itself if it already is."""
        moment = came[name]
        if (scale := came.get(f"{name}_scale")) is None:
            return moment
        moment = from_8_bits(moment, scale, self._table(name, moment.device))
        return moment if MOMENTS[name] else moment.square_()

    def _store(self, name: str, moment: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
        if (kept_scale := kept.get(f"{name}_scale")) is not None:
            moment, scale = to_8_bits(moment if MOMENTS[name] else moment.sqrt_(), self._table(name, moment.device))
            kept_scale.copy_(scale, non_blocking=True)
        kept[name].copy_(moment, non_blocking=True)

    def _table(self, name: str, device: torch.device) -> torch.Tensor:
        signed = MOMENTS[name]
        if signed not in self._tables:
            self._tables[signed] = torch.tensor(dynamic_values(signed), device=device)
        return self._tables[signed]


def _pieces(value: torch.Tensor) -> Iterator[slice]:
    """Divide rows into runs of at most PIECE elements, or 16 rows."""
    if not value.numel():
        return
    # Multiples of 16 rows, so that the fused step vectorises each piece as it does the whole.
    rows = max(16, PIECE // (value.numel() // len(value)) // 16 * 16)
    yield from (slice(start, start + rows) for start in range(0, len(value), rows))


# ------------------------------------------------------------------------------------------------------------- 8 bits


def dynamic_values(signed: bool) -> list[float]:
    """Return the 256 values of a code, ascending, from -1 or 0 to 1: 0, 1, and in each of seven decades below 1 the middles of
    equally long parts, twice as many as in the next lower decade."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        middles = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0 ** (decade - 6) for i in range(parts)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return sorted(values)


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
