"""The memory part of plan.py: a dry run of the learner, a calculation for the engine, and the flags that would make them
fit."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from rich.console import Console
from rich.table import Table

from rl import parts
from rl.errors import UserError
from rl.model.attention import linear_layers
from rl.model.pretrained import load_config, resolve
from rl.ranges import check, flag
from rl.samples.split_schedule import AsyncSchedule
from rl.setup import CommonArgs
from tools.plan.devices import Device, Machine
from tools.plan.dry_run import Memory, dry_run
from tools.plan.roofline import count_parameters, kv_bytes
from tools.plan.workload import lengths_like

SPARE = 0.1  # of the device: the driver's context, NCCL's or HCCL's buffers, and what the allocator rounds up and cannot reuse
GB = 1e9


@dataclass(frozen=True)
class EngineMemory:
    """One rank of an engine, in bytes."""

    weights: int
    kv: int  # of a token
    state: int  # of a response of any length, if layers have states instead of keys and values
    room: float  # for these

    @property
    def tokens(self) -> int:
        """Tokens that fit, on all ranks of the engine together."""
        return max(0, int(self.room / self.kv))

    def responses(self, length: float) -> int:
        """Responses that fit at once, each with this many tokens, prompt included."""
        return max(0, int(self.room / (self.kv * length + self.state)))


@dataclass(frozen=True)
class MemoryPlan:
    """A job's memory on one kind of device. `learner` raises UserError if the run itself would refuse its flags."""

    script: str  # a module
    args: CommonArgs  # its flags
    machine: Machine
    device: Device
    lengths: str = "budget"  # as --response-lengths has them
    image_size: str | None = None

    @cached_property
    def learner(self) -> Memory:
        args = self.args
        prompt, response = args.longest
        workload = lengths_like(self.lengths, args.sampling.rollout_n, response, prompt)
        return dry_run(self.script, args, learners_of(args, self.machine), self.device.kind, workload, self.image_size)

    @cached_property
    def engine(self) -> EngineMemory:
        return engine_memory(self.args, self.device)

    def lacking(self) -> dict[str, float]:
        """Return how many bytes each part lacks."""
        args = self.args
        usable = self.device.memory * (1 - SPARE)
        share = args.engine.gpu_memory_utilization * self.device.memory  # of the engine
        needs = {"learner": self.learner.peak - usable}
        if not args.schedule.split:
            needs["learner while the engine generates"] = self.learner.kept.total() + share - usable
        needs["engine"] = self.engine.kv * sum(args.longest) + self.engine.state - self.engine.room
        return {name: bytes for name, bytes in needs.items() if bytes > 0}


def say(what: str | Table) -> None:
    Console().print(what, highlight=False, soft_wrap=isinstance(what, str))


def plan_memory(plan: MemoryPlan) -> None:
    """Print what the run holds on the device and in host memory, whether it fits, and if not, which flags make it fit. Raise
    UserError if it cannot be planned."""
    show(plan)
    name = plan.device.name
    if not (lacking := plan.lacking()):
        say(f"It fits on {name}.")
        return
    for what, by in lacking.items():
        say(f"It does not fit on {name}: the {what} lacks {by / GB:.1f} GB.")
    item, size = plan.learner.device.most_common(1)[0]
    say(f"The learner's largest item: {item}, {size / GB:.1f} GB.")
    if found := remedy(plan):
        words, changed = found
        say(f"It fits with {words}, counted the same way: {changed.learner.peak / GB:.1f} GB at the learner's peak.")
    else:
        say("None of the changes tried makes it fit: more or larger devices are needed.")


def learners_of(args: CommonArgs, machine: Machine) -> int:
    if not args.schedule.split:
        return machine.nodes * machine.per_node
    return machine.split(args.schedule.generators, args.engine.rollout_tp).learners


def engine_memory(args: CommonArgs, device: Device) -> EngineMemory:
    """Calculate as vLLM does: its share of the device, less the weights, holds keys and values, divided among --rollout-tp
    ranks."""
    config = load_config(resolve(args.model), args.trust_remote_code)
    parameters = count_parameters(config, args.trust_remote_code)
    precision = args.engine.weights_dtype(args.learner.dtype).itemsize
    weights = precision * parameters // args.engine.rollout_tp
    heads = getattr(config.get_text_config(), "num_key_value_heads", None) or config.get_text_config().num_attention_heads
    kv = kv_bytes(config) * precision // 2 // min(args.engine.rollout_tp, heads)
    state = 0
    if linear_layers(config):
        from rl.model.hybrid.states import States

        own = States(config.get_text_config(), 1, args.engine.weights_dtype(args.learner.dtype), torch.device("cpu"))
        state = (own.inputs.nbytes + own.recurrent.nbytes) // args.engine.rollout_tp
    return EngineMemory(weights, kv, state, args.engine.gpu_memory_utilization * device.memory * (1 - SPARE) - weights)


def remedy(plan: MemoryPlan) -> tuple[str, MemoryPlan] | None:
    """Return (flags, the plan with them) of the first change that makes it fit. Each is tried by a dry run: single changes
    first, then combinations; changes that cost the least time first."""
    flags = parts.flat(plan.args)
    single = [change for change in candidates(plan.args, plan.machine) if not change.items() <= flags.items()]
    tries = [[change] for change in single] + [single[: n + 1] for n in range(1, len(single))]
    for tried in tries:
        values = {name: value for change in tried for name, value in change.items()}
        changed = dataclasses.replace(plan, args=parts.replace(plan.args, **values))
        try:
            check(changed.args)
            if changed.lacking():
                continue
        except UserError:
            continue
        return " ".join(f"{flag(name)} {value}" for name, value in values.items() if value != flags[name]), changed
    return None


def candidates(args: CommonArgs, machine: Machine) -> Iterator[dict]:
    """Yield changes of flags that take memory off the device: cheap ones first, those that change what is computed last."""
    shared = parts.replace(args, sequence_parallel=2 * args.learner.sequence_parallel)
    yield {"gradient_checkpointing": True}
    yield {"max_tokens_per_micro_batch": longest_on_a_rank(args)}
    share = args.engine.gpu_memory_utilization
    yield from ({"gpu_memory_utilization": other} for other in (0.4, 0.3, 0.6, 0.8, 0.9) if (other < share) == (share >= 0.5))
    if args.engine.rollout_tp < machine.per_node:
        yield {"rollout_tp": 2 * args.engine.rollout_tp}
    yield {"sequence_parallel": shared.learner.sequence_parallel, "max_tokens_per_micro_batch": longest_on_a_rank(shared)}
    if not args.learner.param_offload:
        yield {"optimizer_offload": True}
        yield {"param_offload": True, "optimizer_offload": False}
    if args.learner.dtype == "float32":
        yield {"dtype": "bfloat16"}
    if args.learner.optim == "adamw":
        yield {"optim": "adamw_8bit"}


def longest_on_a_rank(args: CommonArgs) -> int:
    """Return the tokens that each rank holds of a prompt and response of full length."""
    return -(-sum(args.longest) // args.learner.sequence_parallel)


def show(plan: MemoryPlan) -> None:
    memory, args, machine = plan.learner, plan.args, plan.machine
    learners = learners_of(args, machine)
    groups = samples_held(args, machine.nodes)
    engine = plan.engine
    together = min(args.engine.max_num_seqs, engine.responses(sum(args.longest)))
    table = Table("GB", "at the peak", "between steps", title=f"a learner of {learners} on {plan.device.name}, as counted")
    for cause in sorted(memory.device | memory.kept, key=lambda cause: -memory.device[cause]):
        table.add_row(cause, *(f"{side[cause] / GB:.2f}" for side in (memory.device, memory.kept)))
    table.add_row("all", f"{memory.peak / GB:.2f}", f"{memory.kept.total() / GB:.2f}", style="bold")
    say(table)
    lines = (
        f"Engine (--gpu-memory-utilization {args.engine.gpu_memory_utilization:g}, --rollout-tp {args.engine.rollout_tp}): "
        f"weights {engine.weights / GB:.1f} GB, room for the keys and values of {engine.tokens:,} tokens: {together:,} "
        f"responses of full length at once, of --max-num-seqs {args.engine.max_num_seqs}.",
        f"Micro-batch: {memory.tokens:,} tokens at most.",
        f"Host memory of the first node's {learners // machine.nodes} learners: {node_memory(plan) / GB:.1f} GB "
        f"({_listed(memory.host)} on the first), without Python and the libraries of each rank; samples that they share: "
        f"{groups * memory.samples / GB:.1f} GB, {groups:,} groups of {memory.samples / 1e6:.2g} MB.",
        f"A checkpoint: {memory.saved / GB:.1f} GB on disk.",
    )
    say("\n".join(lines))


def node_memory(plan: MemoryPlan) -> int:
    """Return bytes of host memory that the learners of the first node hold at most, without samples and Python. Only the first
    learner holds a whole model, and publishes."""
    memory = plan.learner
    learners = learners_of(plan.args, plan.machine) // plan.machine.nodes
    others = sum(size for cause, size in memory.host_kept.items() if cause != "publish")
    return memory.host.total() + (learners - 1) * others


def samples_held(args: CommonArgs, nodes: int) -> int:
    """Return the most groups that the learners of the first of `nodes` nodes hold: those received there, for this step and
    ahead of it, and of this step's all, which are recorded, or with --record-samples off those trained there."""
    schedule = args.schedule
    made = schedule.prompts_per_step * (2 if schedule.split else 1)
    if isinstance(schedule, AsyncSchedule):
        made = schedule.quota(0)
    arrives = schedule.prompts_per_step if args.log.record_samples != "off" else -(-schedule.prompts_per_step // nodes)
    return min(made, -(-made // nodes) + arrives)


def _listed(sizes: Counter) -> str:
    return ", ".join(f"{cause} {size / GB:.1f}" for cause, size in sizes.most_common() if size > 0.05 * GB) or "little"
