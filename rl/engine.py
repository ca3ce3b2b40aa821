"""The generation engine: a small contract, and the embedded engine that fulfils it with a transformers model.

The contract (`Engine`): `add` requests, `step` to get the responses that finished, `update` the weights between two steps.
Every sampled token comes with its log-prob and with the version of the weights that sampled it. What a request samples
depends on its own seed alone, not on which rank serves it or what else is in the batch.

Why an engine of our own: on the demo's model transformers' continuous batching does a third of the tokens/s of plain
`generate()` on a fixed batch, which this one outdoes, and it has no seed per request (benchmarks/results/engine.md).
Left out: multi-modal prompts, prefix caching between groups, tensor parallelism. vLLM is the engine for those
(rl/engine_vllm.py).
"""

import functools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from rl.attention import Packed, check_supported
from rl.device import is_accelerator
from rl.errors import UserError
from rl.forward import hidden_states, is_written_out
from rl.forward_check import PROMPT, check_engine
from rl.pretrained import end_token_ids, load_config, load_tokenizer, load_weights
from rl.ranges import Range


@dataclass
class EngineArgs:
    """Generation: sampling and the engine."""

    rollout_n: Annotated[int, Range(at_least=1)] = 8
    """Responses per prompt."""
    max_response_length: Annotated[int, Range(at_least=1)] = 8
    """Longest response, in tokens. One that reaches it is cut off there."""
    temperature: Annotated[float, Range(at_least=0.01, at_most=100)] = 1.0
    """Sampling temperature. The learner divides its logits by it, too."""
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Nucleus sampling; 1 turns it off. Below 1 the generator's log-probs are those of the truncated distribution."""
    top_k: Annotated[int, Range(at_least=1, also=-1)] = -1
    """Sample from the k likeliest tokens; -1 turns it off."""
    ignore_eos: bool = False
    """Generate past the end token up to --max-response-length, so that all responses have one length: for timing."""
    val_n: Annotated[int, Range(at_least=1)] = 1
    """Responses per validation prompt. Above 1, pass@n is reported, too."""
    val_temperature: Annotated[float, Range(at_least=0.01, at_most=100, also=0)] = 0.0
    """Sampling temperature in validation; 0 is greedy."""
    val_top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Nucleus sampling in validation."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """Inference engine. auto takes vllm where it is installed and the device is not a CPU, otherwise the embedded engine on top
    of transformers, and prints which."""
    max_num_seqs: Annotated[int, Range(at_least=1, at_most=65_536)] = 256
    """Responses that one engine decodes at once."""
    max_num_batched_tokens: Annotated[int, Range(at_least=1)] = 8192
    """Tokens in one forward pass of an engine: prompts to prefill, and with vllm the responses' next tokens, too."""
    rollout_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the engine's copy of the weights; auto takes the learner's --dtype."""
    rollout_tp: Annotated[int, Range(at_least=1)] = 1
    """vllm: ranks that share one engine by tensor parallelism. They must be on one node."""
    gpu_memory_utilization: Annotated[float, Range(above=0, at_most=1)] = 0.5
    """vllm: share of the device's memory for the engine: weights and KV cache. The learner needs the rest."""
    enable_chunked_prefill: bool = True
    """vllm: split long prompts over several steps, so that running responses need not wait for them. Never on a CPU."""
    enforce_eager: bool = False
    """vllm: neither capture graphs nor compile. Slower, but starts quickly and takes less memory. A CPU is always eager."""
    load_format: str = "auto"
    """vllm: how the engine reads the model at the start. "dummy" reads nothing: the learner sends its weights in any case."""
    free_cache_engine: bool = True
    """vllm: free the engine's device memory while the learner works (train_sync.py, not on a CPU)."""


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy (log-probs are then those at temperature 1); top_k -1 and top_p 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    id: object  # anything hashable, handed back with the output
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int  # 64 bits; two requests with the same prompt, settings, seed and weights give the same response
    so_far: "Output | None" = None  # a response that was unfinished when a run stopped, and goes on


@dataclass(frozen=True)
class Output:
    """A response. The three lists are equally long, the end-of-sequence token included."""

    id: object
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "unfinished"]


class Engine(Protocol):
    version: int  # of the weights in use; -1 before the first update
    adopts_memory: bool  # whether there is `adopt`

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Output]:
        """Samples one token for every running request; returns those that finished."""

    def unfinished(self) -> list[Output]:
        """The outputs so far of all unfinished requests, to go on elsewhere as their `so_far`."""

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int, recompute_kv: bool = False) -> None:
        """Takes new weights between two steps. Unfinished responses go on under them, with their KV cache kept as it
        is or recomputed. Raises ValueError if the weights are not exactly the model's."""

    def loaded(self, name: str) -> torch.Tensor | None:
        """The value that the engine computes with now for that parameter, read from its live memory. None where it cannot be
        told."""

    @property
    def num_unfinished(self) -> int: ...


def request_seed(seed: int, ticket: int, response: int) -> int:
    """A 63-bit seed for response number `response` of `ticket`, independent of which rank serves it."""
    return int(np.random.SeedSequence((seed, ticket, response)).generate_state(1, np.uint64)[0] >> 1)


class ScriptedEngine:
    """The contract without a model: `script(request) -> (token_ids, log_probs)`. For tests of what stands around an
    engine: one token a step for every request, in order of arrival."""

    def __init__(self, script, eos_token_id: int):
        self.script, self.eos_token_id, self.version = script, eos_token_id, -1
        self._running: list[tuple[Request, list[int], list[float], list[int]]] = []

    def add(self, request: Request) -> None:
        token_ids, log_probs = self.script(request)
        limit = request.sampling.max_tokens
        versions = list(request.so_far.versions) if request.so_far else []
        self._running.append((request, token_ids[:limit], log_probs[:limit], versions))

    def step(self) -> list[Output]:
        for _, _, _, versions in self._running:
            versions.append(self.version)
        done = [r for r in self._running if len(r[3]) >= len(r[1])]
        self._running = [r for r in self._running if len(r[3]) < len(r[1])]
        reason = {True: "stop", False: "length"}
        return [Output(r.id, t, lp, v, reason[t[-1] == self.eos_token_id]) for r, t, lp, v in done]

    def unfinished(self) -> list[Output]:
        return [Output(r.id, t[: len(v)], lp[: len(v)], list(v), "unfinished") for r, t, lp, v in self._running]

    def update(self, weights, version: int, recompute_kv: bool = False) -> None:
        for _ in weights:
            pass
        self.version = version

    @property
    def num_unfinished(self) -> int:
        return len(self._running)


# ------------------------------------------------------------------------------------------------------ sampling


def sample(logits: torch.Tensor, uniform: torch.Tensor, settings: "SlotSettings") -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling: one uniform number a token, so a request's randomness is a stream of its own.

    logits [A, V] in any precision, uniform [A] in [0, 1) -> (token [A], log-prob of it under the sampled distribution [A]).
    """
    greedy = settings.temperature == 0
    logits = logits.float() / torch.where(greedy, 1.0, settings.temperature)[:, None]
    if settings.truncates:
        logits = _truncate(logits, settings.top_k, settings.top_p)
    log_probs = F.log_softmax(logits, dim=-1)
    cdf = log_probs.exp().cumsum(-1)
    # right=True never picks a token of probability 0; the target stays below the last step, whatever the rounding.
    target = torch.minimum(uniform[:, None] * cdf[:, -1:], cdf[:, -1:].nextafter(torch.zeros_like(cdf[:, -1:])))
    token = torch.searchsorted(cdf, target, right=True).squeeze(1)
    token = torch.where(greedy, log_probs.argmax(-1), token)
    return token, log_probs.gather(1, token[:, None]).squeeze(1)


def _truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Sets to -inf what lies outside the top k (k <= 0: all) and the nucleus p. [A, V], [A], [A] -> [A, V]."""
    values, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    drop = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probs = values.masked_fill(drop, -torch.inf).softmax(-1)
    drop |= probs.cumsum(-1) - probs >= top_p[:, None]  # the token that crosses p stays
    drop[:, 0] = False
    return logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)


@dataclass
class SlotSettings:
    """The sampling settings of the first A slots, one entry a slot."""

    temperature: torch.Tensor  # [A] float
    top_k: torch.Tensor  # [A] long
    top_p: torch.Tensor  # [A] float
    truncates: bool  # whether any slot needs the sort


# ------------------------------------------------------------------------------------------------ the KV cache


class KVCache:
    """One tensor [layers, 2, slots, H_kv, length, D]. Slots 0..A-1 are in use, with no holes: a decode step works
    on a plain slice, and a finished response frees its slot for the last one."""

    def __init__(self, config, slots: int, max_length: int, dtype: torch.dtype, device: torch.device):
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = (config.num_hidden_layers, 2, slots, heads, max_length, dim)
        self.data = torch.zeros(self.shape, dtype=dtype, device=device)

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copies the first `length` tokens of slots source [n] to slots target [n]."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]


class PrefillLayout(Packed):
    """Packed prompts that leave their keys and values in the cache: sequence i in slot slots[i]."""

    def __init__(self, lengths: list[int], slots: list[int], cache: KVCache, device: torch.device):
        super().__init__(lengths, device)
        self.cache = cache
        self.slot = torch.tensor(slots).repeat_interleave(torch.tensor(lengths)).to(device)  # [T]

    def attend(self, layer: int, query, key, value, scaling: float) -> torch.Tensor:
        self.cache.data[layer, 0, self.slot, :, self.position_ids] = key
        self.cache.data[layer, 1, self.slot, :, self.position_ids] = value
        return super().attend(layer, query, key, value, scaling)


class DecodeLayout:
    """One new token for each of the first A slots, at position position[a]."""

    def __init__(self, position: torch.Tensor, longest: int, cache: KVCache):
        self.cache, self.position, self.longest = cache, position, longest  # longest: tokens after this step
        self.row = torch.arange(len(position), device=position.device)
        later = torch.arange(longest, device=position.device)[None] > position[:, None]  # [A, L]
        # of numbers: a mask of booleans would become one in every layer
        mask = torch.zeros(later.shape, dtype=cache.data.dtype, device=position.device)
        self.mask = mask.masked_fill_(later, -torch.inf)[:, None, None]  # [A, 1, 1, L]

    def attend(self, layer: int, query, key, value, scaling: float) -> torch.Tensor:
        """query [A, H, D]; key, value [A, H_kv, D]; returns [A, H, D]."""
        rows = len(self.position)
        keys, values = self.cache.data[layer, :, :rows, :, : self.longest]  # [A, H_kv, L, D] each
        keys[self.row, :, self.position] = key
        values[self.row, :, self.position] = value
        # The query heads that share a key head stand in the query's length dimension: no key is copied for them.
        grouped = query.view(rows, key.shape[1], -1, query.shape[2])  # [A, H_kv, H / H_kv, D]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scaling)
        return out.reshape(query.shape)


# ---------------------------------------------------------------------------------------------------- the engine


@dataclass
class Running:
    """A request in a slot and what it has sampled so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @staticmethod
    def of(request: Request) -> "Running":
        before = request.so_far
        return Running(request, *(map(list, (before.token_ids, before.log_probs, before.versions)) if before else ()))

    @property
    def in_kv(self) -> tuple[int, ...]:
        """The tokens whose keys and values the next decoding step needs: all but the newest sampled one."""
        return (*self.request.prompt_ids, *self.token_ids[:-1])

    def output(self, reason: str) -> Output:
        return Output(self.request.id, self.token_ids, self.log_probs, self.versions, reason)


class TransformersEngine:
    """Continuous batching over slots of a preallocated KV cache.

    A step prefills what waits (each distinct prompt once: the n responses of a group share the work), then decodes one
    token for every slot. `max_length` bounds prompt + response, in tokens.
    """

    adopts_memory = True

    def __init__(
        self,
        model_path: str,
        max_length: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        end_tokens: set[int] | None = None,
    ):
        check_supported(load_config(model_path, trust_remote_code), f"--model {model_path}", max_length)
        self.model = load_weights(model_path, dtype, trust_remote_code, say=False)
        self.model.to(device).eval().requires_grad_(False)
        self.device, self.dtype = torch.device(device), dtype
        self.sleeps = is_accelerator(self.device)
        self.max_length, self.max_num_seqs, self.max_num_batched_tokens = (
            max_length,
            max_num_seqs,
            max_num_batched_tokens,
        )
        self.eos = end_tokens or end_token_ids(model_path, trust_remote_code=trust_remote_code)
        self.written_out = is_written_out(self.model)
        self.version = -1
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []  # running[a] is in slot a
        self.cache: KVCache | None = None
        # Per slot. `uniform` holds a request's random numbers, one a token; all of them depend on its seed only.
        self.position = torch.zeros(max_num_seqs, dtype=torch.long, device=self.device)  # of the newest token
        self.token = torch.zeros(max_num_seqs, dtype=torch.long, device=self.device)  # the newest token, not yet in the KV
        self.uniform = torch.zeros(max_num_seqs, max_length, device=self.device)
        check_engine(self._decode_all, self.model, model_path, dtype)

    # -- the contract

    def add(self, request: Request) -> None:
        longest = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids or longest > self.max_length:
            raise ValueError(f"request {request.id}: {longest} tokens (prompt + budget) do not fit in {self.max_length}")
        self.waiting.append(request)

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @torch.no_grad()
    def step(self) -> list[Output]:
        finished = self._admit()
        if self.running:
            rows = len(self.running)
            layout = DecodeLayout(self.position[:rows], self._longest() + 1, self._kv())
            token, position = self.token[:rows], self.position[:rows]
            finished += self._sample(self._forward(token, position, layout), 0)
        return finished

    def unfinished(self) -> list[Output]:
        rows = [*self.running, *(Running.of(request) for request in self.waiting)]
        return [Output(r.request.id, list(r.token_ids), list(r.log_probs), list(r.versions), "unfinished") for r in rows]

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int, recompute_kv: bool = False) -> None:
        missing = set(self._parameters)
        for name, tensor in weights:
            target = self._parameters.get(name)
            if target is None or target.shape != tensor.shape:
                raise ValueError(f"weight {name} {list(tensor.shape)} does not belong to the engine's model")
            if target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(f"the update lacks {len(missing)} weights, {sorted(missing)[0]} first")
        self.version = version
        if recompute_kv:
            self._recompute_kv()

    def loaded(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def adopt(self, memory: dict[str, torch.Tensor]) -> None:
        """Makes these tensors, one of each parameter's shape and precision, its parameters' memory, values kept: whoever
        writes into them changes the weights; `update` has nothing to copy then."""
        for name, parameter in self._parameters.items():
            memory[name].copy_(parameter)
            parameter.data = memory[name]

    def sleep(self) -> None:
        """Gives the KV cache back while the learner works; only between responses. Not on a CPU: clearing a new one takes a
        tenth of a small model's step."""
        if self.num_unfinished:
            raise RuntimeError(f"the engine cannot sleep with {self.num_unfinished} unfinished responses")
        if self.sleeps:
            self.cache = None

    # -- mechanics

    @functools.cached_property
    def _parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name, tied ones once: the learner sends each stored tensor once too."""
        return dict(self.model.named_parameters())

    def _kv(self) -> KVCache:
        if self.cache is None:
            self.cache = KVCache(self.model.config, self.max_num_seqs, self.max_length, self.dtype, self.device)
        return self.cache

    def _decode_all(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [S, L] -> logits [S, L - PROMPT, V] that predict all but the first PROMPT tokens: those are prefilled, the others
        decoded one by one. For the check of the forward pass; uses a cache of its own."""
        sequences, length = ids.shape
        cache = KVCache(self.model.config, sequences, length, self.dtype, self.device)
        layout = PrefillLayout([PROMPT] * sequences, list(range(sequences)), cache, self.device)
        hidden = self._forward(ids[:, :PROMPT].flatten(), layout.position_ids, layout)
        logits = [self.model.lm_head(hidden[layout.cu_seqlens[1:] - 1])]
        for place in range(PROMPT, length - 1):
            position = torch.full((sequences,), place, device=self.device)
            hidden = self._forward(ids[:, place], position, DecodeLayout(position, place + 1, cache))
            logits.append(self.model.lm_head(hidden))
        return torch.stack(logits, dim=1)

    def _longest(self) -> int:
        """The largest position among the running requests, known on the host without asking the device."""
        return max(len(r.request.prompt_ids) + len(r.token_ids) for r in self.running) - 1

    def _forward(self, token: torch.Tensor, position: torch.Tensor, layout) -> torch.Tensor:
        """token, position [T] -> hidden states [T, hidden]."""
        if self.written_out:
            return hidden_states(self.model, token, position, layout)
        rows = {"input_ids": token[None], "position_ids": position[None]}
        return self.model.model(**rows, use_cache=False, layout=layout)[0][0]

    def _admit(self) -> list[Output]:
        """Moves waiting requests to free slots, within the prefill's token budget, and samples their first tokens. Those that
        go on from somewhere have theirs; they are admitted apart from the others."""
        first, groups, tokens = len(self.running), {}, 0  # groups: what to prefill -> its slots
        while self.waiting and len(self.running) < self.max_num_seqs:
            row = Running.of(self.waiting[0])
            if groups and bool(row.token_ids) != bool(self.running[first].token_ids):
                break
            if row.in_kv not in groups and groups and tokens + len(row.in_kv) > self.max_num_batched_tokens:
                break
            tokens += len(row.in_kv) if row.in_kv not in groups else 0
            slot = len(self.running)
            groups.setdefault(row.in_kv, []).append(slot)
            self.waiting.popleft()
            self.running.append(row)
            random = np.random.Generator(np.random.Philox(row.request.seed))
            random = random.random(row.request.sampling.max_tokens, np.float32)
            self.uniform[slot, : len(random)] = torch.from_numpy(random)
        if not groups:
            return []
        hidden = self._prefill(list(groups), [slots[0] for slots in groups.values()])
        order = [i for i, slots in enumerate(groups.values()) for _ in slots]
        slots = [slot for slots in groups.values() for slot in slots]
        leader = torch.tensor([slots[0] for slots in groups.values() for _ in slots[1:]], dtype=torch.long)
        follower = torch.tensor([slot for slots in groups.values() for slot in slots[1:]], dtype=torch.long)
        if len(leader):
            self._kv().copy_slots(leader.to(self.device), follower.to(self.device), max(map(len, groups)))
        rows = self.running[first:]
        if rows[0].token_ids:
            self.token[first : len(self.running)] = torch.tensor([r.token_ids[-1] for r in rows]).to(self.device)
            self.position[first : len(self.running)] = torch.tensor([len(r.in_kv) for r in rows]).to(self.device)
            return []
        by_slot = torch.empty(len(slots), dtype=torch.long)
        by_slot[torch.tensor(slots) - first] = torch.tensor(order)
        self.position[first : len(self.running)] = torch.tensor([len(r.in_kv) - 1 for r in rows]).to(self.device)
        return self._sample(hidden[by_slot.to(self.device)], first)

    def _prefill(self, sequences: list[tuple[int, ...]], slots: list[int]) -> torch.Tensor:
        """Fills the slots' KV with the sequences; returns the hidden state of each one's last token [S, hidden]."""
        layout = PrefillLayout([len(s) for s in sequences], slots, self._kv(), self.device)
        ids = torch.tensor([token for s in sequences for token in s]).to(self.device)
        hidden = self._forward(ids, layout.position_ids, layout)
        return hidden[layout.cu_seqlens[1:] - 1]

    def _recompute_kv(self) -> None:
        sequences = [r.in_kv for r in self.running]
        start = 0
        while start < len(sequences):
            end, tokens = start, 0
            while end < len(sequences) and (end == start or tokens + len(sequences[end]) <= self.max_num_batched_tokens):
                tokens += len(sequences[end])
                end += 1
            self._prefill(sequences[start:end], list(range(start, end)))
            start = end

    def _sample(self, hidden: torch.Tensor, first: int) -> list[Output]:
        """Samples the next token of slots first.. from their hidden states [n, hidden]; frees the slots that finished."""
        rows = self.running[first:]
        counts = torch.tensor([len(r.token_ids) for r in rows]).to(self.device)
        uniform = self.uniform[first : len(self.running)].gather(1, counts[:, None]).squeeze(1)
        token, log_prob = sample(self.model.lm_head(hidden), uniform, self._settings(rows))
        self.token[first : len(self.running)] = token
        self.position[first : len(self.running)] += 1
        finished: dict[int, str] = {}
        for slot, (row, t, lp) in enumerate(zip(rows, token.tolist(), log_prob.tolist(), strict=True), start=first):
            row.token_ids.append(t)
            row.log_probs.append(lp)
            row.versions.append(self.version)
            if t in self.eos and not row.request.sampling.ignore_eos:
                finished[slot] = "stop"
            elif len(row.token_ids) >= row.request.sampling.max_tokens:
                finished[slot] = "length"
        outputs = [self.running[slot].output(reason) for slot, reason in finished.items()]
        self._free(finished)
        return outputs

    def _settings(self, rows: list[Running]) -> SlotSettings:
        s = [r.request.sampling for r in rows]
        return SlotSettings(
            temperature=torch.tensor([x.temperature for x in s]).to(self.device),
            top_k=torch.tensor([x.top_k for x in s]).to(self.device),
            top_p=torch.tensor([x.top_p for x in s]).to(self.device),
            truncates=any(x.top_k > 0 or x.top_p < 1 for x in s),
        )

    def _free(self, slots: Iterable[int]) -> None:
        """Fills the freed slots from the end, so that those in use stay 0..A-1."""
        slots = set(slots)
        if not slots:
            return
        left = len(self.running) - len(slots)
        holes = [slot for slot in sorted(slots) if slot < left]
        movers = [slot for slot in range(left, len(self.running)) if slot not in slots]
        for hole, mover in zip(holes, movers, strict=True):
            self.running[hole] = self.running[mover]
        del self.running[left:]
        if holes:
            source, target = torch.tensor(movers).to(self.device), torch.tensor(holes).to(self.device)
            for state in (self.position, self.token, self.uniform):
                state[target] = state[source]
            self._kv().copy_slots(source, target, self._longest() + 1)


def rollout_dtype(args: EngineArgs, learner_dtype: str) -> torch.dtype:
    """The precision of the engine's weights, which is also that in which they are sent."""
    return getattr(torch, learner_dtype if args.rollout_dtype == "auto" else args.rollout_dtype)


def make_engine(
    path: str, args: EngineArgs, max_length: int, learner_dtype: str, device: torch.device, trust_remote_code: bool
) -> Engine:
    """The engine the flags ask for, loaded from `path`. Raises UserError if it cannot be had."""
    dtype = rollout_dtype(args, learner_dtype)
    chosen = choose_engine(args.engine, device)
    if args.rollout_tp != 1 and chosen != "vllm":
        raise UserError(f"--rollout-tp {args.rollout_tp}: tensor parallel generation needs --engine vllm.")
    end_tokens = end_token_ids(path, load_tokenizer(path, trust_remote_code), trust_remote_code)
    if chosen == "vllm":
        from rl.engine_vllm import VLLMEngine

        return VLLMEngine(path, args, max_length, dtype, device, trust_remote_code, end_tokens)
    return TransformersEngine(
        path,
        max_length=max_length,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        end_tokens=end_tokens,
    )


def choose_engine(wanted: str, device: torch.device) -> str:
    """ "vllm" or "transformers"; what auto takes is printed, once a job. Raises UserError if vLLM is asked for and missing."""
    if wanted == "transformers" or (wanted == "auto" and not is_accelerator(device)):
        chosen, why = "transformers", "the device is a CPU"
    else:
        try:
            import rl.engine_vllm

            chosen, why = "vllm", f"version {rl.engine_vllm.vllm.__version__} is installed"
        except (ImportError, OSError) as error:  # OSError: a library of another CUDA version
            if wanted == "vllm":
                remedy = (
                    "Install requirements-cuda.txt or requirements-npu.txt (docs/engines.md), or take --engine transformers."
                )
                raise UserError(f"--engine vllm: vLLM cannot be imported here ({error}). {remedy}") from None
            chosen, why = "transformers", f"vLLM cannot be imported: {error}"
    if wanted == "auto" and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(f"engine: {chosen} ({why})", flush=True)
    return chosen
