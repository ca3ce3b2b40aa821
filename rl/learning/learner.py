"""The learner: a sharded causal language model, its log-probs on packed micro-batches, the optimizer and its rate.

Gradients are summed over ranks, never averaged, because the losses' denominators are global.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from rl.errors import UserError
from rl.learning.args import LearnerArgs, OptimizerArgs
from rl.learning.batch import Batch, MicroBatch, Micros
from rl.learning.placement import load_policy
from rl.model.attention import IN_FP32, dtype_of, linear_layers
from rl.model.policy import Policy
from rl.model.pretrained import load_config
from rl.ranks.device import PACKED_ATTENTION
from rl.ranks.dist import Ranks
from rl.ranks.shards import as_it_is, local
from rl.ranks.watchdog import progress

if TYPE_CHECKING:
    from rl.ranks.gathering import Shards


def make_optimizer(parameters: Iterable[torch.nn.Parameter], args: OptimizerArgs) -> torch.optim.Optimizer:
    """Return AdamW: torch's own, or one whose moments take less of the device."""
    knobs = {"lr": args.lr, "betas": (0.9, args.adam_beta2), "weight_decay": args.weight_decay}
    if args.optim == "adamw" and not args.optimizer_offload:
        return torch.optim.AdamW(parameters, **knobs, fused=True)
    from rl.learning.compact_adamw import CompactAdamW

    return CompactAdamW(parameters, on_host=args.optimizer_offload, in_8_bits=args.optim == "adamw_8bit", **knobs)


def moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the parameter's sharded moments by name: zeros before its first step."""
    state = optimizer.state[parameter]
    if not isinstance(optimizer, torch.optim.AdamW):
        optimizer.begin(parameter)
    elif not state:
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter.data) for _ in range(2))
    return {name: tensor for name, tensor in state.items() if name != "step"}


def lr_factor(step: int, total_steps: int, args: OptimizerArgs) -> float:
    """Return the factor of --lr in training step `step`, from 0: a linear warm-up from 1 / lr_warmup_steps to 1, then constant
    or a cosine down to min_lr_ratio at total_steps. verl's warm-up is one step behind: its first step has the rate 0."""
    if step < args.lr_warmup_steps:
        return (step + 1) / args.lr_warmup_steps
    if args.lr_scheduler_type == "constant":
        return 1.0
    done = min(1.0, (step - args.lr_warmup_steps) / max(1, total_steps - args.lr_warmup_steps))
    cosine = 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * done))))
    return args.min_lr_ratio + (1 - args.min_lr_ratio) * cosine


@dataclass
class Forward:
    """The policy's forward pass over a micro-batch, float32, on its device."""

    log_prob: torch.Tensor  # [n], of the tokens, with gradient
    entropy: torch.Tensor  # [n]
    top_log_prob: torch.Tensor | None = None  # [n, K], of the teacher's most likely tokens, with gradient


class Learner:
    """The policy under training, its optimizer and schedule, and the frozen reference policy, if any."""

    # for `load_policy`; a critic has others
    role = "policy"
    kind = Policy
    is_known = False
    critic = None  # of rl/algorithm/critic.py, if the advantages need one
    teacher = None  # of rl/algorithm/teacher.py, with --teacher

    def __init__(
        self,
        path: str,
        args: LearnerArgs,
        ranks: Ranks,
        total_steps: int,
        temperature: float = 1.0,
        with_reference: bool = False,
        trust_remote_code: bool = False,
        seed: int = 0,
    ):
        """path: the model, as a directory or hub name. seed: of adapters."""
        self.path, self.args, self.temperature, self.total_steps = path, args, temperature, total_steps
        self._trust_remote_code = trust_remote_code
        self.config = load_config(path, trust_remote_code)
        self.ranks = ranks = self._sharing(ranks)
        self.policy = load_policy(path, args, ranks, self.role, trust_remote_code, seed, self.kind, self.is_known)
        self.adapters = self.policy.adapters  # of rl/learning/adapters.py, with --lora-rank
        self._check_kernels()
        self.reference = None
        if with_reference:
            self.reference = self.adapters.without(self.policy) if self.adapters else self.load_frozen(path, "reference")
        # Parameters that stay in fp32 come first: together they need few buckets.
        named = dict(sorted(self.policy.model.named_parameters(), key=lambda item: not item[0].endswith(IN_FP32)))
        self._trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        changed = self.adapters.weights if self.adapters else self._trained
        self._changed = {name: parameter for name, parameter in named.items() if name in changed}  # perhaps by an adapter
        self.frozen = {n: p for n, p in named.items() if not (n in changed or p.requires_grad)}
        self.parameters = self._changed | self.frozen
        self.optimizer = make_optimizer(self._trained.values(), args)
        self.steps = 0  # training steps begun
        self.updated = 0  # training steps with a gradient, which the learning rate's schedule counts
        self.skipped = 0  # optimizer steps left out for a non-finite gradient
        self._updated_before = 0  # of the training step, as the next
        self._is_frozen = False

    def _sharing(self, ranks: Ranks) -> Ranks:
        """Return the learners with those that share sequences or experts. Raise UserError if they cannot be divided so."""
        if self.args.sequence_parallel > 1:
            from rl.model.sequence_parallel import share_sequences  # late, like all that a plain run does without

            ranks = share_sequences(ranks, self.args.sequence_parallel)
        if self.args.expert_parallel > 1:
            from rl.model.expert_parallel import share_experts

            ranks = share_experts(ranks, self.config, self.args.expert_parallel)
        return ranks

    def load_frozen(self, path: str, role: Literal["reference", "teacher"]) -> Policy:
        """Return a second model, which is not trained."""
        is_known = path == self.path and role == "reference"
        return load_policy(path, self.args, self.ranks, role, self._trust_remote_code, is_known=is_known)

    def _check_kernels(self) -> None:
        """Raise UserError if a kernel of the device does not compute what it should."""
        dtype = getattr(torch, self.args.dtype)
        if self.ranks.device.type in PACKED_ATTENTION:
            from rl.model.attention_kernels import check_kernel

            check_kernel(self.config, self.args.sequence_parallel, dtype, self.ranks.device)
        if linear_layers(self.config):
            from rl.model.hybrid.rule import choose_rule

            choose_rule(self.config.get_text_config(), dtype, self.ranks.device, say=self.ranks.is_main)

    # -- one step: begin_step, then forward, backward and step

    def begin_step(self, has_signal: bool = True) -> None:
        """Begin a training step: set its learning rate. has_signal: False if no response was scored, so that there is nothing
        to learn from without a teacher. As in verl, all optimizer steps of a training step have one rate, so
        a run can resume with a different number of them. The schedule counts the steps that had a gradient."""
        has_signal = has_signal or bool(self.teacher)
        self.steps += 1
        warmup = 0
        if self.critic:
            self.critic.begin_step(has_signal)
            warmup = self.critic.warmup
        self._is_frozen = self.steps <= warmup or not has_signal
        self._updated_before = self.updated
        self.optimizer.param_groups[0]["lr"] = self.args.lr * lr_factor(self.updated, self.total_steps - warmup, self.args)

    def forward(self, micro: MicroBatch, entropy: str = "none", also: torch.Tensor | None = None) -> Forward:
        """Compute the policy's log-probs of the micro-batch's n tokens, and of the tokens `also` [n, K] in their places. The
        entropy is 0 ("none"), without gradient ("metric"), or with gradient ("loss"). In a `forward_only` micro-batch the
        gradient ends there, and must be 0."""
        ends_here = micro.forward_only and torch.is_grad_enabled()
        with torch.no_grad() if ends_here else contextlib.nullcontext():
            log_prob, entropies = self.log_probs(self.policy, micro, entropy, True, micro.real_tokens, also)
        if ends_here:
            for x in (log_prob, entropies) if entropy == "loss" else (log_prob,):
                x.requires_grad_().register_hook(_refuse)
        return Forward(log_prob, entropies) if also is None else Forward(log_prob[:, 0], entropies, log_prob[:, 1:])

    def log_probs(
        self,
        model: Policy,
        micro: MicroBatch,
        entropy: str = "none",
        replays: bool = False,
        observe: int = 0,
        also: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-prob, entropy [n]) under a model; the first is [n], or [n, 1 + K] with `also`. replays: the routes of a
        mixture of experts; observe: tokens of the row that count in the routers' metrics."""
        progress()
        routes = None
        if replays and self.args.router_replay != "off":
            from rl.model.router import routes_for

            routes = routes_for(self.args, micro, self.ranks.device)
        labels = micro.labels
        if also is not None:
            labels = torch.cat([labels[:, None], (also if micro.own is None else also[micro.own]).long()], 1)
        if micro.support is not None:
            from rl.model import sampling_mask

            labels = sampling_mask.labels(labels, micro.support)
        own = model(micro.inputs, micro.layout, micro.predict, labels, self.temperature, entropy, routes, observe)
        if micro.support is not None:
            own = sampling_mask.restricted(own[0], micro.support), own[1]
        if micro.own is None:
            return own
        from rl.model.sequence_parallel import gather_log_probs

        return gather_log_probs(micro, self.ranks, *own)

    @torch.no_grad()
    def log_probs_of(self, which: Literal["policy", "reference"], batch: Batch, micros: Micros) -> torch.Tensor:
        """Return log-probs [N] of the tokens that this rank trains, on the CPU, from its micro-batches of every mini-batch; 0
        outside the mask. With --router-replay R2 the micro-batches keep the policy's routes."""
        model = getattr(self, which)
        replays = which == "policy"
        out = torch.zeros(len(batch.token))
        for micro in itertools.chain.from_iterable(micros):
            records = replays and self.args.router_replay == "R2"
            if records:
                micro.routes = None  # the generator's
            out[micro.index] = self.log_probs(model, micro, replays=replays)[0].cpu()
            if records:
                micro.routes = self.policy.router.chosen()
        if model is not self.policy:
            model.reshard()  # the root stays gathered after a forward pass; only the policy's update follows
        return out

    def clip(self) -> float:
        """Clip the accumulated gradient. Return the norm that it had, of all ranks."""
        if self.ranks.expert_parallel > 1:
            from rl.model.expert_parallel import clip_grad_norm

            return clip_grad_norm(self._trained.values(), self.args.grad_clip)
        norm = nn.utils.clip_grad_norm_(self._trained.values(), self.args.grad_clip)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self) -> dict[str, float]:
        """Clip the accumulated gradient and take the optimizer's step, except during a critic's warm-up and without a signal: a
        gradient of 0, or a step that has nothing to learn from, leaves weights, moments and schedule as they are. A non-finite
        gradient is dropped on all ranks, and counted. Return verl's actor/grad_norm and actor/lr."""
        norm = self.clip()
        if norm and not self._is_frozen:
            self.updated = self._updated_before + 1
        if not torch.isfinite(torch.tensor(norm)):
            self.skipped += 1
        elif norm and not self._is_frozen:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "actor/grad_norm": norm,
            "actor/lr": self.optimizer.param_groups[0]["lr"],
            "actor/skipped_steps": self.skipped,
            "actor/updated_steps": self.updated,
        }

    def router_metrics(self) -> dict[str, float]:
        """Return moe/* of the training since the last call; none for a dense model. A collective."""
        return self.policy.router.metrics() if self.policy.router else {}

    # -- the weights that are sent

    @torch.no_grad()
    def weights(
        self, dtype: torch.dtype = torch.float32, to: Sequence[int] | None = None, frozen: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor on the device) of every parameter, tied ones once; without `frozen` only of trained ones,
        which come first. One bucket at a time, so that there are never two copies of the model. A collective: all ranks
        iterate in step. Tensors are cast to `dtype` before they travel. to: the ranks that get them, by default all."""
        self.policy.reshard()  # a forward pass without backward leaves the root's parameters gathered: no DTensors
        held = self.parameters if frozen else self._changed
        shards = self._shards if self.ranks.world_size > 1 else None
        change = self.adapters.merger(self._trained, self.ranks.device, shards) if self.adapters else as_it_is
        if shards:
            for sent_as, named in itertools.groupby(held.items(), lambda item: dtype_of(item[0], dtype)):
                yield from shards.whole(dict(named), self.ranks.device, sent_as, to, change)
            return
        for name, parameter in held.items():
            yield name, change(name, local(parameter.data).to(self.ranks.device))

    @cached_property
    def _shards(self) -> "Shards":
        from rl.ranks.gathering import Shards  # late: a rank that learns alone has nothing to gather

        return Shards(self.parameters | self._trained)

    # -- the state in a checkpoint; the reference policy is the model that training started from

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the sharded tensors that training changes, by `<set>.<parameter>`: the set "model" or "adapter" has the
        weights, each of AdamW's moments is a set, and a critic's sets begin with `critic.`. Moments are created if an
        optimizer has not stepped yet; a checkpoint is read into them in place."""
        self.policy.reshard()
        out = {}
        weights = "adapter" if self.adapters else "model"
        for name, parameter in self._trained.items():
            out[f"{weights}.{name}"] = parameter.data
            out |= {f"{key}.{name}": moment for key, moment in moments(self.optimizer, parameter).items()}
        if self.critic:
            out |= {f"critic.{name}": tensor for name, tensor in self.critic.state_tensors().items()}
        return out

    def state(self) -> dict:
        """Return the rest of the state that is the same on all ranks."""
        first = next(iter(self.optimizer.state.values()))
        own = {"adam_step": int(first["step"]), "steps": self.steps, "skipped": self.skipped, "updated": self.updated}
        return own | ({"critic": self.critic.state()} if self.critic else {})

    def rank_state(self) -> dict:
        """Return the rest of the state that differs by rank."""
        return {"rng": torch.get_rng_state().tolist()}

    def restore(self, state: dict, rank_state: dict | None) -> None:
        """Restore `state` and `rank_state`; the tensors have been read already."""
        for of_parameter in self.optimizer.state.values():
            of_parameter["step"].fill_(state["adam_step"])
        if self.critic:
            self.critic.restore(state["critic"], None)
        self.steps, self.skipped, self.updated = state["steps"], state["skipped"], state["updated"]
        if rank_state:
            torch.set_rng_state(torch.tensor(rank_state["rng"], dtype=torch.uint8))


def _refuse(grad: torch.Tensor) -> None:
    """Raise UserError unless the loss's gradient of log-probs or entropies [n] is 0."""
    if grad.nan_to_num(nan=0.0).any():  # NaN comes from log-probs that are NaN, which are reported elsewhere
        raise UserError(
            "the loss trains responses whose advantages are all 0, but they have no backward pass. Take the line "
            "`micros = whole_batch.forward_only(batch, micros)` out of `learn`."
        )
