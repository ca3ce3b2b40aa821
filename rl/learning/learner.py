"""The learner: a sharded causal language model, its log-probs on packed micro-batches, and the optimizer's step.

Gradients are summed over ranks, never averaged, because the losses' denominators are global.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rl.adapters.lora import Adapters, WithoutAdapters
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, Forward, MicroBatch, TopTokens
from rl.learning.division import OF_BACKWARD
from rl.learning.flops import Computed, least_flops
from rl.learning.forward_only import check_no_gradient
from rl.learning.masters import set_apart, take_masters
from rl.learning.optimizer import lr_factor, make_optimizer, moments
from rl.learning.placement import load_policy
from rl.model import sampling_mask
from rl.model.attention import IN_FP32, dtype_of, linear_layers
from rl.model.attention_kernels import check_kernel
from rl.model.expert_parallel import clip_grad_norm, share_experts
from rl.model.policy import Policy
from rl.model.pretrained import load_config
from rl.model.router import routes_for
from rl.model.sequence_parallel import gather_log_probs, share_sequences
from rl.model.shards import Shards, as_it_is, local
from rl.ranks.device import memory_gb, peak_flops
from rl.ranks.dist import Ranks
from rl.ranks.watchdog import progress

UNMEASURED_TOKENS = 8192  # of a micro-batch, unless --max-tokens-per-micro-batch auto has measured


@dataclass(frozen=True)
class Outgoing:
    """The tensors that a learner sends to engines and generators: whole tensors under the model's names."""

    shapes: dict[str, list[int]]  # by name, in the order of the tensors: those that training changes come first
    frozen: frozenset[str]  # names of the others
    tensors: Callable[..., Iterator[tuple[str, torch.Tensor]]]  # Learner.weights
    apart: bool = False  # with --publish adapter: only adapters, which engines apply to the frozen weights


class Learner:
    """The policy under training, its optimizer and schedule, and the frozen reference policy and teacher, if any."""

    critic = None  # of rl/learning/value_model.py, if the advantages need one
    imitation = None  # of rl/algorithm/imitation.py, with --sft-files
    teacher_rows = None  # of rl/algorithm/teacher_rows.py, with --teacher-prompt

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
        """path, teacher: models, as directories or hub names. teacher_top_k: tokens of the teacher to compare at each position,
        0 for the sampled one only. seed: of adapters."""
        self.path, self.args, self.temperature, self.total_steps = path, args, temperature, total_steps
        self.config = load_config(path, trust_remote_code)
        self.ranks = ranks = share_experts(share_sequences(ranks, args.sequence_parallel), self.config, args.expert_parallel)
        self.policy = self._load(trust_remote_code, seed)
        self.adapters: Adapters | None = self.policy.adapters
        check_kernel(self.config, args.sequence_parallel, getattr(torch, args.dtype), ranks.device)
        if linear_layers(self.config):
            from rl.model.hybrid.kernels import choose_rule

            choose_rule(self.config.get_text_config(), getattr(torch, args.dtype), ranks.device, say=ranks.is_main)
        self.reference = WithoutAdapters(self.policy) if self.adapters and with_reference else None
        if with_reference and not self.adapters:
            self.reference = load_policy(path, args, ranks, "reference", trust_remote_code, is_known=True)
        self.teacher_top_k = teacher_top_k
        self.teacher = None
        if teacher == path and self.adapters:  # they are all that differs
            self.teacher = WithoutAdapters(self.policy)
        elif teacher:
            self.teacher = load_policy(teacher, args, ranks, "teacher", trust_remote_code)
        # The fp32 weights by name, if the policy has them in bf16.
        in_bf16 = args.dtype == "bfloat16" and not isinstance(self.policy, FSDPModule)
        self.masters = set_apart(self.policy, on_host=args.masters_on_host) if in_bf16 or args.masters_on_host else {}
        # Parameters that stay in fp32 come first: together they need few buckets.
        named = dict(sorted(self.policy.model.named_parameters(), key=lambda item: not item[0].endswith(IN_FP32)))
        self._trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        changed = self.adapters.weights if self.adapters else self._trained
        self._changed = {name: parameter for name, parameter in named.items() if name in changed}  # perhaps by an adapter
        self.frozen = {n: p for n, p in named.items() if not (n in changed or p.requires_grad)}
        self.parameters = self._changed | self.frozen
        masters = {named[name]: master for name, master in self.masters.items()}
        self.optimizer = make_optimizer(self._trained.values(), args, masters)
        self.skipped = 0  # optimizer steps left out for a non-finite gradient
        self.updated = 0  # training steps with a gradient, which the learning rate's schedule counts
        self.begin_step(1)
        self.chosen_tokens: int | None = None  # of a micro-batch, with the flag's auto (rl/learning/token_budget.py)

    def _load(self, trust_remote_code: bool, seed: int) -> Policy:
        return load_policy(self.path, self.args, self.ranks, "policy", trust_remote_code, seed)

    @property
    def micro_batch_tokens(self) -> int:
        """Return the most tokens of a micro-batch on this rank."""
        given = self.args.max_tokens_per_micro_batch
        return (self.chosen_tokens or UNMEASURED_TOKENS) if given == "auto" else given

    def forward(
        self, micro: MicroBatch, entropy: Literal["none", "metric", "loss"] = "none", also: torch.Tensor | None = None
    ) -> Forward:
        """Compute the policy's log-probs of the micro-batch's n tokens, and of the tokens `also` [n, K] in their places. The
        entropy is 0 ("none"), without gradient ("metric"), or with gradient ("loss"). In a `forward_only` micro-batch the
        gradient ends there, and must be 0."""
        ends_here = micro.forward_only and torch.is_grad_enabled()
        with torch.no_grad() if ends_here else contextlib.nullcontext():
            log_prob, entropies = self._log_probs(self.policy, micro, entropy, True, micro.real_tokens, also)
        self.computed.add(micro)
        if ends_here:
            check_no_gradient(log_prob, *([entropies] if entropy == "loss" else []))
        return Forward(log_prob, entropies) if also is None else Forward(log_prob[:, 0], entropies, log_prob[:, 1:])

    def _log_probs(
        self,
        model: Policy,
        micro: MicroBatch,
        entropy: str = "none",
        replays: bool = False,
        observe: int = 0,
        also: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-prob, entropy [n]); the first is [n], or [n, 1 + K] with `also`. replays: the routes of a mixture of
        experts; observe: tokens of the row that count in the routers' metrics."""
        progress()
        routes = routes_for(self.args, micro, self.ranks.device) if replays else None
        labels = micro.labels
        if also is not None:
            labels = torch.cat([labels[:, None], (also if micro.own is None else also[micro.own]).long()], 1)
        if micro.support is not None:
            labels = sampling_mask.labels(labels, micro.support)
        own = model(micro.inputs, micro.layout, micro.predict, labels, self.temperature, entropy, routes, observe)
        if micro.support is not None:
            own = sampling_mask.restricted(own[0], micro.support), own[1]
        return own if micro.own is None else gather_log_probs(micro, self.ranks, *own)

    @torch.no_grad()
    def log_probs_of(
        self, which: Literal["policy", "reference"], batch: Batch, micros: Sequence[Sequence[MicroBatch]]
    ) -> torch.Tensor:
        """Return log-probs [N] of the tokens that this rank trains, on the CPU, from its micro-batches of every mini-batch; 0
        outside the mask. With --router-replay R2 the micro-batches keep the policy's routes."""
        model = getattr(self, which)
        replays = which == "policy"
        out = torch.zeros(len(batch.token))
        for micro in itertools.chain.from_iterable(micros):
            records = replays and self.args.router_replay == "R2"
            if records:
                micro.routes = None  # the generator's
            out[micro.index] = self._log_probs(model, micro, replays=replays)[0].cpu()
            if records:
                micro.routes = self.policy.router.chosen()
        if model is not self.policy:
            model.reshard()  # the root stays gathered after a forward pass; only the policy's update follows
        return out

    @torch.no_grad()
    def read_by_teacher(self, batch: Batch, micros: Sequence[Sequence[MicroBatch]]) -> tuple[torch.Tensor, TopTokens | None]:
        """Return the teacher's log-probs [N] of the tokens that this rank trains, on the CPU, and with --teacher-top-k its most
        likely tokens; 0 outside the mask. The teacher reads the prompts of --teacher-prompt if there are any."""
        rows = self.teacher_rows.rows(batch, micros, self.ranks) if self.teacher_rows else itertools.chain.from_iterable(micros)
        count = self.teacher_top_k
        out = torch.zeros(len(batch.token))
        top = TopTokens(torch.zeros(len(out), count, dtype=torch.int32), torch.zeros(len(out), count)) if count else None
        for micro in rows:
            if not count:
                out[micro.index] = self._log_probs(self.teacher, micro)[0].cpu()
                continue
            progress()
            what = (micro.predict, micro.labels, self.temperature, "none")
            vocabulary = self.config.get_text_config().vocab_size
            sampled, token, log_prob = self.teacher(micro.inputs, micro.layout, *what, top=(count, vocabulary))
            if micro.own is not None:
                every = torch.cat([sampled[:, None], token.float(), log_prob], 1)  # exact: token ids are below 2^24
                every, _ = gather_log_probs(micro, self.ranks, every, torch.zeros_like(sampled))
                sampled, token, log_prob = every.split([1, count, count], 1)
            out[micro.index] = sampled.view(-1).cpu()
            top.token[micro.index] = token.to("cpu", torch.int32)
            top.log_prob[micro.index] = log_prob.cpu()
        self.teacher.reshard()
        return out, top

    def begin_step(self, step: int, has_signal: bool = True) -> None:
        """Set the learning rate of training step `step`, from 1, and start counting FLOPs. has_signal: False if there is
        nothing to learn from. As in verl, all optimizer steps of a training step have one rate, so a run can resume with a
        different number of them. The schedule counts the steps that had a gradient."""
        self.computed = Computed()
        warmup = 0
        if self.critic:
            self.critic.begin_step(step, has_signal)
            warmup = self.critic.warmup
        if self.imitation:
            self.imitation.begin_step(step)
        self.is_frozen = step <= warmup or not has_signal
        self._updated_before = self.updated
        self.optimizer.param_groups[0]["lr"] = self.args.lr * lr_factor(self.updated, self.total_steps - warmup, self.args)

    def clip(self) -> float:
        """Clip the accumulated gradient. Return the norm that it had, of all ranks."""
        if self.ranks.expert_parallel > 1 or self.args.grad_dtype == "bfloat16":
            return clip_grad_norm(self._trained.values(), self.args.grad_clip)
        norm = nn.utils.clip_grad_norm_(self._trained.values(), self.args.grad_clip)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self) -> dict[str, float]:
        """Clip the accumulated gradient and take the optimizer's step, except during a critic's warm-up and without a signal: a
        gradient of 0, or a step that has nothing to learn from, leaves weights, moments and schedule as they are. A non-finite
        gradient is dropped on all ranks, and counted. Return verl's actor/grad_norm and actor/lr."""
        norm = self.clip()
        if norm and not self.is_frozen:
            self.updated = self._updated_before + 1
        if not torch.isfinite(torch.tensor(norm)):
            self.skipped += 1
        elif norm and not self.is_frozen:
            self.optimizer.step()
        self.optimizer.zero_grad()
        lr = self.optimizer.param_groups[0]["lr"]
        return {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "actor/skipped_steps": self.skipped,
            "actor/updated_steps": self.updated,
        }

    def perf_metrics(self, batch: Batch, seconds: dict[str, float], num_ranks: int) -> dict[str, float]:
        """Return verl's perf/*: throughput in tokens (prompt + response) per second and rank of the job, over a step's
        `seconds` by phase; MFU of the update, which computes each prompt once, if the device's peak is known; the wasted part
        of its FLOPs (rl/learning/flops.py); peak memory. A collective."""
        tokens, step_seconds = sum(batch.total_lengths()), sum(seconds.values())
        out = {"perf/total_num_tokens": tokens, "perf/time_per_step": step_seconds} | memory_gb()
        out["perf/throughput"] = tokens / step_seconds / num_ranks
        out |= self.computed.metrics(self.config, batch, self.args.ppo_epochs)
        if (peak := peak_flops()) and seconds.get("update_actor"):
            flops = least_flops(self.config, batch, frozen=bool(self.adapters))
            if self.policy.takes_images:
                from rl.data.image_prompts import image_sizes, tower_flops  # late: few models take any

                patches = [n for prompt in batch.distinct_prompts() for n in image_sizes(self.config, prompt.tolist())]
                flops += tower_flops(self.config, patches, self.args.freeze_vision_tower)
            flops *= self.args.ppo_epochs * (1 - out["perf/forward_only"] * OF_BACKWARD)
            out["perf/mfu/actor"] = flops / seconds["update_actor"] / peak / self.ranks.world_size
        return out

    def router_metrics(self) -> dict[str, float]:
        """Return moe/* of the training since the last call; none for a dense model. A collective."""
        return self.policy.router.metrics() if self.policy.router else {}

    def outgoing(self) -> Outgoing:
        """Return the tensors to send: their names never change, their values are those at the time of reading."""
        if self.args.publishes_adapters:
            shapes = {name: list(parameter.shape) for name, parameter in (self._trained | self.parameters).items()}
            return Outgoing(shapes, frozenset(self.parameters), self.apart, apart=True)
        shapes = {name: list(parameter.shape) for name, parameter in self.parameters.items()}
        return Outgoing(shapes, frozenset(self.frozen), self.weights)

    @torch.no_grad()
    def weights(
        self, dtype: torch.dtype = torch.float32, to: Sequence[int] | None = None, frozen: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor on the device) of every parameter, tied ones once; without `frozen` only of trained ones,
        which come first. One bucket at a time, so that there are never two copies of the model. A collective: all ranks
        iterate in step. Tensors are cast to `dtype` before they travel. to: the ranks that get them, by default all."""
        self.policy.reshard()  # a forward pass without backward leaves the root's parameters gathered: no DTensors
        held = self.parameters if frozen else self._changed
        if dtype != torch.bfloat16 and not self.adapters:
            held = held | self.masters
        merged = self.adapters.merger(self._trained | self.masters, self.ranks.device) if self.adapters else as_it_is
        yield from self._whole(held, dtype, to, merged)

    @torch.no_grad()
    def apart(
        self, dtype: torch.dtype = torch.float32, to: Sequence[int] | None = None, frozen: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield as `weights` does, but the adapters on their own, first; with `frozen`, the model without them follows."""
        self.policy.reshard()
        held = self._trained if dtype == torch.bfloat16 else self._trained | self.masters
        yield from self._whole(held | self.parameters if frozen else held, dtype, to, as_it_is)

    def _whole(self, held: dict[str, torch.Tensor], dtype: torch.dtype, to: Sequence[int] | None, change) -> Iterator:
        if self.ranks.world_size > 1:
            for sent_as, named in itertools.groupby(held.items(), lambda item: dtype_of(item[0], dtype)):
                yield from self._shards.whole(dict(named), self.ranks.device, sent_as, to, change)
            return
        for name, parameter in held.items():
            yield name, change(name, local(parameter.data).to(self.ranks.device))

    @cached_property
    def _shards(self) -> Shards:
        return Shards(self.parameters | self._trained)

    # -- the state in a checkpoint; the reference policy is the model that training started from

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the sharded tensors that training changes, by `<set>.<parameter>`: the set "model" or "adapter" has the master
        weights, each of AdamW's moments is a set, and a critic's sets begin with `critic.`. Moments are created if an
        optimizer has not stepped yet; a checkpoint is read into them in place."""
        self.policy.reshard()
        out = {}
        weights = "adapter" if self.adapters else "model"
        for name, parameter in self._trained.items():
            out[f"{weights}.{name}"] = self.masters.get(name, parameter.data)
            out |= {f"{key}.{name}": moment for key, moment in moments(self.optimizer, parameter).items()}
        if self.critic:
            out |= {f"critic.{name}": tensor for name, tensor in self.critic.state_tensors().items()}
        return out

    def state(self) -> dict:
        """Return the rest of the state that is the same on all ranks."""
        first = next(iter(self.optimizer.state.values()))
        own = {"adam_step": int(first["step"]), "skipped": self.skipped, "updated": self.updated}
        own |= {"chosen_tokens": self.micro_batch_tokens}
        return own | ({"critic": self.critic.state()} if self.critic else {})

    def rank_state(self) -> dict:
        """Return the rest of the state that differs by rank."""
        return {"rng": torch.get_rng_state().tolist()}

    def restore(self, state: dict, rank_state: dict | None) -> None:
        """Restore `state` and `rank_state`; the tensors have been read already."""
        for of_parameter in self.optimizer.state.values():
            of_parameter["step"].fill_(state["adam_step"])
        take_masters(self._trained, self.masters)
        if self.critic:
            self.critic.restore(state["critic"], None)
        self.skipped = state["skipped"]
        self.updated = state["updated"]
        self.chosen_tokens = state.get("chosen_tokens")
        if rank_state:
            torch.set_rng_state(torch.tensor(rank_state["rng"], dtype=torch.uint8))
