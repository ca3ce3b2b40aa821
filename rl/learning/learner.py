"""The learner: a sharded causal language model, its log-probs on packed micro-batches, and the optimizer's step.

FSDP2 shards every decoder layer and the rest; not where one rank learns alone and on its device: there is nothing to gather or
to reduce, and FSDP would copy weights and gradients all the same, a tenth and more of a small model's step. In bf16 such a rank
computes with weights that were cast once an update (rl/learning/masters.py).
Gradients are summed over ranks, never averaged: the losses' denominators are global already.
Left out: the loss itself, which is in the scripts and in losses.py.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from rl.adapters.lora import AdapterArgs, Adapters, WithoutAdapters, adapt
from rl.data.image_prompts import image_sizes, tower_flops
from rl.errors import UserError
from rl.learning.activation_offload import keep_inputs_on_host
from rl.learning.batch import Batch, MicroBatch
from rl.learning.division import OF_BACKWARD
from rl.learning.flops import Computed, head_flops, train_flops_per_token
from rl.learning.forward_only import check_no_gradient
from rl.learning.masters import keep_in_bf16, set_apart, take_masters
from rl.learning.optimizer import OptimizerArgs, make_optimizer, moments, set_learning_rate
from rl.learning.top_tokens import TopTokens
from rl.model.attention_kernels import check_kernel
from rl.model.compiled import compile_layers
from rl.model.expert_parallel import clip_grad_norm, divide_experts, fetch_ahead, share_experts
from rl.model.forward_check import check_policy
from rl.model.lean_layers import keep_less
from rl.model.loading import fill, open_weights
from rl.model.policy import LOGITS_KEPT, Policy
from rl.model.pretrained import empty_model, layers, load_config
from rl.model.router import Router, RouterArgs, routes_for
from rl.model.sequence_parallel import gather_log_probs, share_sequences
from rl.model.shards import Shards, as_it_is, local
from rl.ranges import Range
from rl.ranks.device import default_dtype, is_accelerator, memory_gb, peak_flops
from rl.ranks.dist import Ranks
from rl.ranks.watchdog import progress

UNMEASURED_TOKENS = 8192  # of a micro-batch, where --max-tokens-per-micro-batch auto has not measured


@dataclass
class LearnerArgs(AdapterArgs, OptimizerArgs, RouterArgs):
    """Precision, memory and layout of the learners."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation; auto is bfloat16 on an accelerator and float32 on a CPU. Master weights are fp32 in any
    case; so are gradients and the optimizer's moments unless --grad-dtype and --optim say otherwise."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations, and logits of a large vocabulary, in the backward pass. Takes less memory and about a
    third more time."""
    compile: bool = False
    """Compile the learner's decoder layers (torch.compile), for updates that are about a sixth faster. Compiling takes tens of
    seconds, or a few with a warm cache on disk. It needs a C++ compiler on a CPU and Triton on a GPU."""
    param_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    activation_offload: bool = False
    """Keep each layer's input, which --gradient-checkpointing saves, in host memory until the backward pass."""
    ref_offload: bool = True
    """Keep the reference policy and the teacher in host memory while they are not in use (accelerators only)."""
    max_tokens_per_micro_batch: Annotated[int | Literal["auto"], Range(at_least=1, also="auto")] = "auto"
    """Most tokens, of prompts and responses, in a packed micro-batch on one rank. auto: as many as the accelerator's memory
    holds (8,192 with images), or as many as are fastest on a CPU. At least one sequence of full length."""
    sequence_parallel: Annotated[int, Range(at_least=1)] = 1
    """Learners that share each packed micro-batch, for sequences that do not fit on one (Ulysses). A micro-batch then has up to
    this many times --max-tokens-per-micro-batch tokens."""
    expert_parallel: Annotated[int, Range(at_least=1)] = 1
    """Learners that share the experts of each layer: tokens are sent to their experts, where each learner would gather all."""
    ppo_epochs: Annotated[int, Range(at_least=1)] = 1
    """Passes over each batch."""
    freeze_vision_tower: bool = False
    """Do not train the vision tower of a model that takes images. It is published once."""

    def __post_init__(self):
        if self.dtype == "auto":
            self.dtype = default_dtype()

    @property
    def masters_on_host(self) -> bool:
        """Whether the fp32 weights are in host memory, and the device has them in bf16 (rl/learning/masters.py)."""
        return self.optimizer_offload and self.dtype == "bfloat16"

    def check(self) -> None:
        """Raises UserError for flags of which only one can hold, or that cannot do what they are for."""
        if self.optimizer_offload and self.param_offload:
            raise UserError(
                "--optimizer-offload: --param-offload keeps the moments in host memory already. Leave one of them out."
            )
        if self.activation_offload and not self.gradient_checkpointing:
            raise UserError(
                "--activation-offload moves what --gradient-checkpointing leaves; all activations are too much to move. Add "
                "--gradient-checkpointing."
            )


def load_policy(
    path: str,
    args: LearnerArgs,
    ranks: Ranks,
    offload: bool,
    role: Literal["policy", "reference", "teacher", "critic"],
    trust_remote_code: bool,
    seed: int = 0,
    kind: type[Policy] = Policy,
    is_known: bool = False,
) -> Policy:
    """The model at `path` (a directory or a hub name), sharded over all ranks; each reads its own part of the weights. They are
    in fp32 if they are trained, and frozen in --dtype. seed: of adapters. is_known: the policy has been read and checked from
    the same files. Raises UserError if weights are missing, or if what is computed with them is not what transformers
    computes."""
    trainable = role in ("policy", "critic")
    weights = open_weights(path, trust_remote_code, say=not is_known) if ranks.is_main else None
    if weights and not is_known:
        if not args.compile:
            keep_less(weights.model)
        with weights.by_layer():
            check_policy(Policy(weights.model, Router.of(weights.model, args)).eval(), path)
    model = empty_model(load_config(path, trust_remote_code), trust_remote_code)
    model.requires_grad_(trainable)
    if args.freeze_vision_tower:
        model.model.visual.requires_grad_(False)
    adapters = adapt(model, args, f"--model {path}") if args.adapted and trainable else None
    if adapters and args.dtype == "bfloat16":
        keep_in_bf16(parameter for parameter in model.parameters() if not parameter.requires_grad)
    if trainable and args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if args.activation_offload:
            keep_inputs_on_host(model, ranks.device)
    if args.compile:
        compile_layers(model, path)
    else:
        keep_less(model)
    logits_kept = 0 if args.gradient_checkpointing else LOGITS_KEPT
    policy = kind(model, Router.of(model, args), logits_kept)
    policy.adapters = adapters
    _compute_as_sampled(policy)
    if args.dtype == "bfloat16" and not trainable:
        keep_in_bf16(policy.parameters())
    sharded = _shard(policy, args, ranks, offload)
    _take_memory(policy, "cpu" if offload else ranks.device, tie=not sharded)
    fill(model, weights, path, ranks, say=not is_known)
    if adapters:
        adapters.begin(model, seed)
    if ranks.expert_parallel > 1:
        fetch_ahead(layers(model))
    return policy


def _shard(policy: Policy, args: LearnerArgs, ranks: Ranks, offload: bool) -> bool:
    """Leaves each rank its part of every layer. False where there is nothing to gather, to reduce or to move; with images in
    bf16 there is, for FSDP casts what comes into each of their layers, too."""
    options = {"mesh": ranks.mesh["data"]}
    if "bfloat16" in (args.dtype, args.grad_dtype):
        computed, reduced = getattr(torch, args.dtype), getattr(torch, args.grad_dtype)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=is_accelerator(ranks.device))
    alone = ranks.world_size == 1 and not offload and args.grad_dtype == "float32"
    if alone and (args.dtype == "float32" or not policy.takes_images):
        return False
    if ranks.expert_parallel > 1:
        divide_experts(policy.model, ranks, options)
    for layer in layers(policy.model):
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for module in policy.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)  # sum, not mean
            module.set_force_sum_reduction_for_comms(True)
    return True


def _take_memory(policy: Policy, device: torch.device | str, tie: bool) -> None:
    """Gives all parameters memory, without values. tie: names of one parameter stay so; FSDP sees to that itself."""
    names = defaultdict(list)
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    policy.to_empty(device=device)
    for first, *others in names.values() if tie else ():
        for name in others:
            module, _, leaf = name.rpartition(".")
            setattr(policy.get_submodule(module), leaf, policy.get_parameter(first))


def _compute_as_sampled(policy: Policy) -> None:
    """The policy that learns must be the policy that sampled: no dropout, no noise on a router, whatever the config says.
    Gradient checkpointing alone asks a layer whether it trains, before the layer's forward."""
    policy.eval()
    for layer in policy.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            layer.training, layer.forward = True, partial(_in_eval, layer, layer.forward)


def _in_eval(layer: nn.Module, forward: Callable, *args, **kwargs):
    layer.training = False
    try:
        return forward(*args, **kwargs)
    finally:
        layer.training = True


@dataclass(frozen=True)
class Outgoing:
    """What leaves a learner, for engines, generators and the export of a checkpoint: whole tensors under the model's names."""

    shapes: dict[str, list[int]]  # by name, in the order in which the tensors come: those that training changes are first
    frozen: frozenset[str]  # the names of the others
    tensors: Callable[..., Iterator[tuple[str, torch.Tensor]]]  # Learner.weights


class Learner:
    """The policy under training, its optimizer and schedule, and the frozen reference policy and teacher if there are any."""

    critic = None  # of rl/learning/critic.py, where the advantages need one

    def __init__(
        self,
        path: str,
        args: LearnerArgs,
        ranks: Ranks,
        total_steps: int,
        temperature: float = 1.0,
        with_reference: bool = False,
        trust_remote_code: bool = False,
        teacher: str | None = None,
        teacher_top_k: int = 0,
        seed: int = 0,
    ):
        """path, teacher: of models, directories or hub names. teacher_top_k: tokens of the teacher that are compared at each
        place, 0 for the sampled one alone. seed: of adapters."""
        self.path, self.args, self.temperature, self.total_steps = path, args, temperature, total_steps
        self.config = load_config(path, trust_remote_code)
        self.ranks = ranks = share_experts(share_sequences(ranks, args.sequence_parallel), self.config, args.expert_parallel)
        self.policy = self._load(trust_remote_code, seed)
        self.adapters: Adapters | None = self.policy.adapters
        check_kernel(self.config, args.sequence_parallel, getattr(torch, args.dtype), ranks.device)
        self.reference = WithoutAdapters(self.policy) if self.adapters and with_reference else None
        if with_reference and not self.adapters:
            offload = args.ref_offload and is_accelerator(ranks.device)
            self.reference = load_policy(path, args, ranks, offload, "reference", trust_remote_code, is_known=True)
        self.teacher, self.teacher_top_k = None, teacher_top_k
        if teacher:
            offload = args.ref_offload and is_accelerator(ranks.device)
            self.teacher = load_policy(teacher, args, ranks, offload, "teacher", trust_remote_code)
        # The fp32 weights by name where the policy has them in bf16.
        beside = args.dtype == "bfloat16" and not isinstance(self.policy, FSDPModule)
        self.masters = set_apart(self.policy, on_host=args.masters_on_host) if beside or args.masters_on_host else {}
        named = dict(self.policy.model.named_parameters())
        self._trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        changed = self.adapters.weights if self.adapters else self._trained
        self._changed = {name: parameter for name, parameter in named.items() if name in changed}  # perhaps by an adapter
        self.frozen = {n: p for n, p in named.items() if not (n in changed or p.requires_grad)}
        self.parameters = self._changed | self.frozen
        masters = {named[name]: master for name, master in self.masters.items()}
        self.optimizer = make_optimizer(self._trained.values(), args, masters)
        self.begin_step(1)
        self.skipped = 0  # optimizer steps left out for a non-finite gradient
        self.chosen_tokens: int | None = None  # of a micro-batch, where the flag says auto (rl/learning/token_budget.py)

    def _load(self, trust_remote_code: bool, seed: int) -> Policy:
        return load_policy(self.path, self.args, self.ranks, self.args.param_offload, "policy", trust_remote_code, seed)

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of a micro-batch on this rank."""
        given = self.args.max_tokens_per_micro_batch
        return (self.chosen_tokens or UNMEASURED_TOKENS) if given == "auto" else given

    def log_probs(
        self, micro: MicroBatch, entropy: Literal["none", "metric", "loss"] = "none"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob [n], entropy [n]) of the micro-batch's n tokens under the policy, on the device, with gradient; the entropy
        is 0, without gradient, or with it. Of a micro-batch that is `forward_only` the gradient ends there, and has to be 0."""
        ends_here = micro.forward_only and torch.is_grad_enabled()
        with torch.no_grad() if ends_here else contextlib.nullcontext():
            out = self._log_probs(self.policy, micro, entropy, observe=micro.real_tokens, top=micro.top)
        if micro.top:
            micro.top.log_prob, out = out[0][:, 1:], (out[0][:, 0], out[1])
        self.computed.add(micro)
        if ends_here:
            check_no_gradient(*out[: 2 if entropy == "loss" else 1])
        return out

    def _log_probs(
        self, model: Policy, micro: MicroBatch, entropy: str, observe: int = 0, top: TopTokens | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        progress()
        routes = routes_for(self.args, micro, self.ranks.device) if model is self.policy else None
        labels = top.labels(micro.labels, micro.own) if top else micro.labels
        what = (micro.predict, labels, self.temperature, entropy, routes, observe)
        own = model(micro.inputs, micro.layout, *what)
        return own if micro.own is None else gather_log_probs(micro, self.ranks, *own)

    @torch.no_grad()
    def log_probs_of(
        self, which: Literal["policy", "reference", "teacher"], batch: Batch, micros: list[list[MicroBatch]]
    ) -> torch.Tensor:
        """Log-probs [N] of the tokens that this rank trains, on the CPU, from its micro-batches of every mini-batch; 0 of those
        outside the mask. With --router-replay R2 these keep the policy's routes."""
        model = getattr(self, which)
        out = torch.zeros(len(batch.token))
        for micro in itertools.chain.from_iterable(micros):
            records = which == "policy" and self.args.router_replay == "R2"
            if records:
                micro.routes = None  # the generator's
            if which == "teacher" and self.teacher_top_k:
                log_prob = self._find_top_tokens(micro)
            else:
                log_prob, _ = self._log_probs(model, micro, "none")
            out[micro.index] = log_prob.cpu()
            if records:
                micro.routes = self.policy.router.chosen()
        if model is not self.policy:
            model.reshard()  # the root stays gathered after a forward pass; an update follows for the policy alone
        return out

    def _find_top_tokens(self, micro: MicroBatch) -> torch.Tensor:
        """Leaves the teacher's most likely tokens in the micro-batch; returns its log-probs [n] of the sampled ones."""
        progress()
        count, rows = self.teacher_top_k, self.config.get_text_config().vocab_size
        what = (micro.predict, micro.labels, self.temperature, "none")
        sampled, token, log_prob = self.teacher(micro.inputs, micro.layout, *what, top=(count, rows))
        if micro.own is not None:
            every = torch.cat([sampled[:, None], token.float(), log_prob], 1)  # exact: tokens' numbers are below 2^24
            every, _ = gather_log_probs(micro, self.ranks, every, torch.zeros_like(sampled))
            sampled, token, log_prob = every.split([1, count, count], 1)
        micro.top = TopTokens(token.to("cpu", torch.int32), log_prob.cpu())
        return sampled.view(-1)

    def begin_step(self, step: int) -> None:
        """Takes the learning rate of training step `step`, from 1, for all optimizer steps until the next call, and counts
        what is computed from here on."""
        self.computed, frozen = Computed(), 0
        if self.critic:
            self.critic.begin_step(step)
            frozen = self.critic.warmup
        self.is_frozen = step <= frozen
        set_learning_rate(self.optimizer, self.args, max(1, step - frozen), self.total_steps - frozen)

    def step(self) -> dict[str, float]:
        """Clips the accumulated gradient and takes the optimizer's step, but for a critic's warm-up. A non-finite gradient is
        dropped, the same on all ranks, and counted. Returns verl's actor/grad_norm and actor/lr."""
        if self.ranks.expert_parallel > 1 or self.args.grad_dtype == "bfloat16":
            norm = clip_grad_norm(self._trained.values(), self.args.grad_clip)
        else:
            norm = nn.utils.clip_grad_norm_(self._trained.values(), self.args.grad_clip)
            norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not torch.isfinite(torch.tensor(norm)):
            self.skipped += 1
        elif not self.is_frozen:
            self.optimizer.step()
        self.optimizer.zero_grad()
        lr = self.optimizer.param_groups[0]["lr"]
        return {"actor/grad_norm": norm, "actor/lr": lr, "actor/skipped_steps": self.skipped}

    def perf_metrics(self, batch: Batch, seconds: dict[str, float], num_ranks: int) -> dict[str, float]:
        """verl's perf/*: throughput in tokens (prompt + response) per second and rank of the job, over a step's `seconds` by
        phase; MFU of the update, which computes each prompt once, where the device's peak is known; the part of its FLOPs that
        was for nothing (rl/learning/flops.py); peak memory. A collective."""
        lengths = batch.total_lengths()
        tokens, step_seconds = sum(lengths), sum(seconds.values())
        out = {"perf/total_num_tokens": tokens, "perf/time_per_step": step_seconds} | memory_gb()
        out["perf/throughput"] = tokens / step_seconds / num_ranks
        out |= self.computed.metrics(self.config, batch, self.args.ppo_epochs)
        if (peak := peak_flops()) and seconds.get("update_actor"):
            flops = train_flops_per_token(self.config, tokens / max(1, len(lengths)), frozen=bool(self.adapters))
            flops *= batch.distinct_tokens()
            flops -= head_flops(self.config) * int((batch.lengths - batch.sampled_lengths).sum())
            if self.policy.takes_images:
                patches = [n for prompt in batch.distinct_prompts() for n in image_sizes(self.config, prompt.tolist())]
                flops += tower_flops(self.config, patches, self.args.freeze_vision_tower)
            flops *= self.args.ppo_epochs * (1 - out["perf/forward_only"] * OF_BACKWARD)
            out["perf/mfu/actor"] = flops / seconds["update_actor"] / peak / self.ranks.world_size
        return out

    def router_metrics(self) -> dict[str, float]:
        """The moe/* of what was trained since the last call; none for a dense model. A collective."""
        return self.policy.router.metrics() if self.policy.router else {}

    def outgoing(self) -> Outgoing:
        """What leaves this learner, which does not change while it lives; the values are those of when they are asked for."""
        shapes = {name: list(parameter.shape) for name, parameter in self.parameters.items()}
        return Outgoing(shapes, frozenset(self.frozen), self.weights)

    @torch.no_grad()
    def weights(
        self, dtype: torch.dtype = torch.float32, to: Sequence[int] | None = None, frozen: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor on the device) of every parameter, tied ones once; without `frozen` of those that are trained,
        which come first. A bucket at a time, so that there never are two copies of the model; a collective, which all ranks
        walk through in step. What has to travel is cast to `dtype` before. to: the ranks that get them, by default all."""
        self.policy.reshard()  # a forward without backward leaves the root's parameters gathered, which are then no DTensors
        held = self.parameters if frozen else self._changed
        if dtype != torch.bfloat16 and not self.adapters:
            held = held | self.masters
        merged = self.adapters.merger(self._trained | self.masters, self.ranks.device) if self.adapters else as_it_is
        if self.ranks.world_size > 1:
            yield from self._shards.whole(held, self.ranks.device, dtype, to, merged)
            return
        for name, parameter in held.items():
            yield name, merged(name, local(parameter.data).to(self.ranks.device))

    @cached_property
    def _shards(self) -> Shards:
        return Shards(self.parameters)

    # -- what a checkpoint holds in addition to the reference policy, which is the model that training began with

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The sharded tensors that training changes, by `<set>.<parameter>`: the set "model" or "adapter" has the master
        weights, and AdamW's moments are a set each; a critic's have `critic.` in front. Made where an optimizer has not stepped
        yet; a checkpoint is read into them in place."""
        self.policy.reshard()
        out, weights = {}, "adapter" if self.adapters else "model"
        for name, parameter in self._trained.items():
            out[f"{weights}.{name}"] = self.masters.get(name, parameter.data)
            out |= {f"{key}.{name}": moment for key, moment in moments(self.optimizer, parameter).items()}
        if self.critic:
            out |= {f"critic.{name}": tensor for name, tensor in self.critic.state_tensors().items()}
        return out

    def state(self) -> dict:
        """The rest, the same on all ranks."""
        first = next(iter(self.optimizer.state.values()))
        own = {"adam_step": int(first["step"]), "skipped": self.skipped, "chosen_tokens": self.micro_batch_tokens}
        return own | {"critic": self.critic.state()} if self.critic else own

    def rank_state(self) -> dict:
        """The rest that differs by rank."""
        return {"rng": torch.get_rng_state().tolist()}

    def restore(self, state: dict, rank_state: dict | None) -> None:
        """Takes `state` and `rank_state` back; the tensors have been read already."""
        for of_parameter in self.optimizer.state.values():
            of_parameter["step"].fill_(state["adam_step"])
        take_masters(self._trained, self.masters)
        if self.critic:
            self.critic.restore(state["critic"], None)
        self.skipped, self.chosen_tokens = state["skipped"], state.get("chosen_tokens")
        if rank_state:
            torch.set_rng_state(torch.tensor(rank_state["rng"], dtype=torch.uint8))
