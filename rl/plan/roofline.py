"""Service times from FLOPs and bandwidths alone: rough, and says so. Good for an order of magnitude and for what limits what.

Each part takes the longer of its arithmetic at the device's peak and its bytes at the memory's bandwidth, both times the
shares that good implementations reach. Left out: preemption, imbalance between ranks, and the host's own work.
"""

from dataclasses import dataclass

import torch

from rl.learning.flops import train_flops_per_token
from rl.model.pretrained import empty_model
from rl.plan.devices import Device
from rl.plan.service_times import EngineTimes, LearnerTimes, ServiceTimes

TRAIN_SHARE, PREFILL_SHARE, DECODE_SHARE = 0.4, 0.5, 0.4  # of the peak that training, prefill and decoding reach
BANDWIDTH_SHARE = 0.7  # of the memory's bandwidth that decoding reaches
STEP_OVERHEAD = 2e-3  # seconds of an engine step that are neither arithmetic nor reading
REDUCE_SECONDS = 1e-5  # of a small all-reduce between the ranks of one engine; there are two in each layer
HOST_LINK = 25e9  # bytes/s between a device and its host, over which a publish goes


@dataclass(frozen=True)
class Shape:
    """What the times depend on of a model."""

    parameters: int
    forward: float  # FLOP a token, attention aside
    attention: float  # FLOP a token and token before it
    kv: int  # bytes of a token's keys and values in bf16
    layers: int

    @staticmethod
    def of(config, parameters: int) -> "Shape":
        """config: a transformers config; parameters: all, of every expert."""
        text = config.get_text_config()
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        forward = train_flops_per_token(config, 0) / 3
        attention = train_flops_per_token(config, 1) / 3 - forward
        return Shape(parameters, forward, attention, 4 * text.num_hidden_layers * heads * dim, text.num_hidden_layers)


def count_parameters(config, trust_remote_code: bool = False) -> int:
    """All parameters of a model, tied ones once, without making it."""
    return sum(p.numel() for p in empty_model(config, trust_remote_code).parameters())


def engine_times(shape: Shape, device: Device, ranks: int, slots: int, precision: int = 2) -> EngineTimes:
    """ranks: --rollout-tp; precision: bytes of a weight."""
    running = tuple(sorted({*(2**k for k in range(slots.bit_length())), slots}))
    flops, bandwidth = ranks * device.flops, ranks * device.bandwidth * BANDWIDTH_SHARE
    overhead = STEP_OVERHEAD + (2 * shape.layers * REDUCE_SECONDS if ranks > 1 else 0.0)
    seconds = []
    for n in running:
        read = precision * min(shape.parameters, n * shape.forward / 2)  # of a mixture: the experts of n tokens, at most all
        seconds.append(max(read / bandwidth, n * shape.forward / (flops * DECODE_SHARE)) + overhead)
    return EngineTimes(
        running=running,
        seconds=tuple(seconds),
        context_token=shape.kv / bandwidth,
        prefill_token=shape.forward / (flops * PREFILL_SHARE),
        receive=precision * shape.parameters / min(HOST_LINK, device.network),
    )


def learner_times(shape: Shape, device: Device, learners: int, passes: float, nodes: int = 1) -> LearnerTimes:
    """passes: forward passes of a step that cost as much as all of it: 3 for an update (4 with checkpointing), 1 for each of
    old log-probs and reference."""
    rate = device.flops * TRAIN_SHARE
    link = device.link if nodes == 1 else device.network
    shards = 3 * 2 * shape.parameters / link if learners > 1 else 0.0  # gathered twice and reduced once, in bf16
    optimizer = 32 * shape.parameters / learners / device.bandwidth  # weights, moments and gradients, read and written
    return LearnerTimes(
        update=shards + optimizer,
        token=passes * shape.forward / rate,
        square=passes * shape.attention / rate,
        publish=2 * shape.parameters / HOST_LINK,
    )


def passes_of(args, updates: int) -> float:
    """Forward passes that the flags ask for, the backward pass counted as two."""
    update = (4 if args.gradient_checkpointing else 3) * args.ppo_epochs
    return update + args.recompute_old_log_probs(updates) + bool(args.needs_reference)


def service_times(shape: Shape, device: Device, args, updates: int, ranks, nodes: int = 1) -> ServiceTimes:
    """The times of a job's ranks (rl/plan/simulation.py) under the scripts' flags."""
    precision = torch.finfo(args.weights_dtype(args.dtype)).bits // 8
    engine = engine_times(shape, device, ranks.per_engine, args.max_num_seqs, precision)
    learner = learner_times(shape, device, ranks.learners, passes_of(args, updates), nodes)
    return ServiceTimes(engine, learner, f"roofline of {device.name}: rough")


def slots_that_fit(shape: Shape, device: Device, ranks: int, args, context: float) -> int:
    """Responses of this many tokens of context whose keys and values fit next to the weights; at most --max-num-seqs."""
    precision = torch.finfo(args.weights_dtype(args.dtype)).bits // 8
    room = ranks * device.memory * args.gpu_memory_utilization - precision * shape.parameters
    return max(1, min(args.max_num_seqs, int(room / (shape.kv * context))))
