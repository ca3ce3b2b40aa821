"""AdamW that takes less of the device: its moments rest in host memory, in 8 bits, or both, and gradients may be in bf16.

The step itself is torch's fused AdamW in fp32 on the device, a piece of a parameter at a time: the moments of the piece are
brought there and put back, and so are its fp32 weights where the device has them in bf16 alone (rl/learning/masters.py). These
copies go under the work on other pieces (rl/learning/overlapped.py). What rests in host memory gives the bits that it would
give on the device. 8 bits do not.

In 8 bits each block of 256 neighbours in a row has an fp32 scale, and each element is one of 256 values that lie the closer
the smaller they are (dynamic tree quantization, arXiv 2110.02861). The second moment is kept as its root: kept as it is, small
ones would become 0 next to first moments that do not, and AdamW divides one by the root of the other. A block never crosses a
row, and FSDP never cuts one, so that a checkpoint fits any number of learners to the bit. That is where torchao's and
bitsandbytes' optimizers differ, whose blocks depend on what a rank holds; the first also compiles its step, the second is for
CUDA.

Between host and device 16 bytes a parameter move in an update, 4 in 8 bits; 8 more for weights in fp32.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw

from rl.learning.overlapped import overlapped
from rl.model.shards import local, zeros_on_host
from rl.ranks.host_memory import PinnedBlocks

PIECE = 1 << 24  # elements that are stepped at once: 64 MB of each moment
BLOCK = 256  # elements with a common scale
NARROW = 64  # shorter rows, and parameters of one dimension, stay in fp32: they are few
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign
MASTER = "master"
TINY = torch.finfo(torch.float32).tiny


@dataclass
class Piece:
    """Rows of a parameter on this rank."""

    value: torch.Tensor  # as the device has them
    grad: torch.Tensor
    step: torch.Tensor  # steps taken before; it is changed
    kept: dict[str, torch.Tensor]  # of these rows: state, and fp32 weights where `value` is in bf16


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
        """masters: the fp32 weights of parameters that are in bf16, in host memory or on their device
        (rl/learning/masters.py)."""
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8})
        self.on_host, self.in_8_bits, self.masters = on_host, in_8_bits, masters or {}
        self._tables: dict[bool, torch.Tensor] = {}
        self._pinned = PinnedBlocks()

    def begin(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The parameter's state, made where there is none yet."""
        if state := self.state[parameter]:
            return state
        value, state["step"] = parameter.data, torch.zeros((), device=parameter.device)
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
        # A slice of one element, of whatever stride, counts as contiguous, and zeros in its likeness would keep that stride.
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    @torch.no_grad()
    def step(self) -> None:
        """Takes a step with every parameter that has a gradient."""
        if self.on_host:
            overlapped(self.param_groups[0]["params"][0].device, self._pieces(), self._fetch, self._step, self._put)
        elif self.masters and not self.in_8_bits:
            self._step_all()
        else:
            for piece in self._pieces():
                self._put(piece, self._step(piece, piece.kept))

    def _step_all(self) -> None:
        """One call for all parameters, where everything rests on the device in fp32."""
        parameters = [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]
        states = [self.begin(parameter) for parameter in parameters]
        values = [self.masters[parameter] for parameter in parameters]
        moments = [[state[name] for state in states] for name in MOMENTS]
        self._adamw(values, [parameter.grad for parameter in parameters], *moments, [state["step"] for state in states])
        torch._foreach_copy_(parameters, values)

    def _adamw(self, values, grads, first_moments, second_moments, steps) -> None:
        """torch's own, in place, of a list of tensors each. It counts the steps."""
        group = self.param_groups[0]
        knobs = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        knobs |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "amsgrad": False, "maximize": False, "fused": True}
        adamw(values, grads, first_moments, second_moments, max_exp_avg_sqs=[], state_steps=steps, **knobs)

    def _pieces(self) -> Iterator[Piece]:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.begin(parameter)
            step = state["step"]
            kept = {name: local(tensor) for name, tensor in state.items() if name != "step"}
            if parameter in self.masters:
                kept[MASTER] = local(self.masters[parameter])
            value, grad = local(parameter.data), local(parameter.grad)
            if not value.dim():  # a scalar has no rows
                value, grad = value.view(1), grad.view(1)
                kept = {name: tensor.view(1) for name, tensor in kept.items()}
            for rows in _pieces(value):
                yield Piece(value[rows], grad[rows], step.clone(), {name: tensor[rows] for name, tensor in kept.items()})
            step += 1

    def _fetch(self, piece: Piece) -> dict[str, torch.Tensor]:
        """What is kept of the piece, on the device; the kept tensors themselves where they are there."""
        return {name: tensor.to(piece.value.device, non_blocking=True) for name, tensor in piece.kept.items()}

    def _step(self, piece: Piece, came: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """came: what is kept of the piece, on the device. Returns what is to be kept."""
        value, moments = came.get(MASTER, piece.value), [self._decoded(name, came) for name in MOMENTS]
        self._adamw([value], [piece.grad.to(value.dtype)], *([moment] for moment in moments), [piece.step])
        made = {}
        for name, moment in zip(MOMENTS, moments, strict=True):
            made |= self._encoded(name, moment, came)
        if MASTER in came:
            piece.value.copy_(value)
            made[MASTER] = value
        return made

    def _put(self, piece: Piece, made: dict[str, torch.Tensor]) -> None:
        for name, tensor in made.items():
            piece.kept[name].copy_(tensor, non_blocking=True)

    def _decoded(self, name: str, came: dict[str, torch.Tensor]) -> torch.Tensor:
        """A moment in fp32; the very tensor that came where it is just that."""
        moment = came[name]
        if (scale := came.get(f"{name}_scale")) is None:
            return moment
        moment = from_8_bits(moment, scale, self._table(name, moment.device))
        return moment if MOMENTS[name] else moment.square_()

    def _encoded(self, name: str, moment: torch.Tensor, came: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if f"{name}_scale" not in came:
            return {name: moment}
        codes, scale = to_8_bits(moment if MOMENTS[name] else moment.sqrt_(), self._table(name, moment.device))
        return {name: codes, f"{name}_scale": scale}

    def _table(self, name: str, device: torch.device) -> torch.Tensor:
        signed = MOMENTS[name]
        if signed not in self._tables:
            self._tables[signed] = torch.tensor(dynamic_values(signed), device=device)
        return self._tables[signed]


def _pieces(value: torch.Tensor) -> Iterator[slice]:
    """Runs of rows of at most PIECE elements, or 16 rows. Their number is a multiple of 16, so that the fused step's vectors
    are those of the whole."""
    if not value.numel():
        return
    rows = max(16, PIECE // (value.numel() // len(value)) // 16 * 16)
    yield from (slice(start, start + rows) for start in range(0, len(value), rows))


# ------------------------------------------------------------------------------------------------------------- 8 bits


def dynamic_values(signed: bool) -> list[float]:
    """The 256 values of a code, ascending, from -1 or 0 to 1: 0, 1, and in each of seven decades below 1 the middles of equally
    long parts, twice as many as in the decade below it."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        middles = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0 ** (decade - 6) for i in range(parts)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return sorted(values)


def to_8_bits(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., C] -> (codes [..., C] uint8, the index of the nearest value; scale [..., C / 256 rounded up] fp32, the largest
    magnitude of each block)."""
    blocks = _blocks(x)  # [..., C / 256, 256]
    scale = blocks.abs().amax(-1)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scale.clamp(min=TINY)[..., None], between, out_int32=True)
    return codes.to(torch.uint8).flatten(-2)[..., : x.shape[-1]], scale


def from_8_bits(codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The values [..., C] of codes [..., C] and their blocks' scales [..., C / 256 rounded up]."""
    values = table[_blocks(codes).int()] * scale[..., None]
    return values.flatten(-2)[..., : codes.shape[-1]].contiguous()


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [..., C / 256 rounded up, 256], filled up with zeros."""
    missing = -x.shape[-1] % BLOCK
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, BLOCK))
