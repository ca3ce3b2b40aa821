"""Seconds of a run's parts from the device's data sheet alone: an order of magnitude, and the limiting resource.

Each part takes the longer of its arithmetic at the device's peak and its bytes at the memory's bandwidth, both times the
shares that good implementations reach. Left out: preemption, imbalance between ranks, and the host's own work.
"""

from rl.algorithm.teacher import teacher_path
from rl.learning.flops import train_flops_per_token
from rl.model.attention import linear_layers
from rl.model.pretrained import empty_model, load_config, resolve
from tools.plan.devices import Device, Roles
from tools.plan.simulation import Times

TRAIN_SHARE, PREFILL_SHARE, DECODE_SHARE = 0.4, 0.5, 0.4  # of the peak that training, prefill and decoding reach
BANDWIDTH_SHARE = 0.7  # of the memory's bandwidth that decoding reaches
STEP_OVERHEAD = 2e-3  # seconds of an engine step that are neither arithmetic nor reading
REDUCE_SECONDS = 1e-5  # of a small all-reduce between the ranks of one engine; there are two in each layer
HOST_LINK = 25e9  # bytes/s between a device and its host, over which a publish goes


def kv_bytes(config) -> int:
    """Return the bytes of a token's keys and values in bf16."""
    text = config.get_text_config()
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 4 * (text.num_hidden_layers - len(linear_layers(text))) * heads * dim


def count_parameters(config, trust_remote_code: bool = False) -> int:
    """Return the number of a model's parameters, tied ones once, without building it."""
    return sum(p.numel() for p in empty_model(config, trust_remote_code).parameters())


def forward_flops(config) -> tuple[float, float]:
    """Return the FLOP of a token in a forward pass without attention, and the FLOP that each earlier token adds."""
    forward = train_flops_per_token(config, 0) / 3
    return forward, train_flops_per_token(config, 1) / 3 - forward


def times_of(config, parameters: int, device: Device, args, roles: Roles, nodes: int = 1) -> Times:
    """config: a transformers config; parameters: their number, of all experts."""
    updates = args.learner.ppo_epochs * -(-args.schedule.prompts_per_step // args.schedule.prompts_per_update)
    forward, attention = forward_flops(config)
    backward = 1 if args.learner.adapted else 2  # in forward passes: the inputs' gradients, and those of the weights
    passes = (backward + (2 if args.learner.gradient_checkpointing else 1)) * args.learner.ppo_epochs
    passes += args.recompute_old_log_probs(updates) + bool(args.loss.needs_reference)
    of_teacher = (0.0, 0.0)
    if args.teacher.teacher:
        of_teacher = forward_flops(load_config(teacher_path(args, resolve(args.model)), args.trust_remote_code, "--teacher"))
    train = device.flops * TRAIN_SHARE
    flops = roles.per_engine * device.flops
    bandwidth = roles.per_engine * device.bandwidth * BANDWIDTH_SHARE
    precision = args.engine.weights_dtype(args.learner.dtype).itemsize
    reduces = 2 * config.get_text_config().num_hidden_layers if roles.per_engine > 1 else 0
    link = device.link if nodes == 1 else device.network
    trained = 0 if args.learner.adapted else parameters  # adapters hardly count
    shards = 2 * (2 * parameters + trained) / link if roles.learners > 1 else 0.0  # gathered twice and reduced once, in bf16
    optimizer = 32 * trained / roles.learners / device.bandwidth  # weights, moments and gradients, read and written
    return Times(
        source=f"the data sheet of {device.name}: rough",
        step=STEP_OVERHEAD + reduces * REDUCE_SECONDS,
        row=forward / (flops * DECODE_SHARE),
        weights=precision * parameters / bandwidth,
        row_weights=precision * forward / 2 / bandwidth,
        context=kv_bytes(config) / bandwidth,
        prefill=forward / (flops * PREFILL_SHARE),
        receive=precision * parameters / min(HOST_LINK, device.network),
        learn=updates * (shards + optimizer),
        token=(passes * forward + of_teacher[0]) / train,
        square=(passes * attention + of_teacher[1]) / train,
        publish=2 * parameters / HOST_LINK,
    )
