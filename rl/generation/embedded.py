"""The engine contract of rl/generation/engine.py over a transformers model, in this process: for the demo, tests and small
models.

Why not transformers' continuous batching: on the demo's model it has a third of the tokens/s of plain `generate()` on a fixed
batch, which this engine exceeds, and it has no seed per request (benchmarks/results/engine.md). Left out: prefix caching
between groups, tensor parallelism. The engine for those is vLLM (rl/generation/vllm/engine.py).

First the engine, then its decoding step: the KV cache, with the layouts through which attention fills and reads it
(rl/model/attention.py), the forward pass of the common model families, written out, and sampling. With a small model,
transformers' modules spend half of the time around the products: on a CPU the pass written out decodes the demo's model 1.23
times and a model of 30M parameters 1.2 to 1.4 times as fast. Other families use the model itself. The results equal the
modules' up to rounding: residuals are added within the products, and the two halves of the rotation are one product with a
signed sine.
"""

import functools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rl.generation.engine import Output, Request, SamplingParams, check_length, checked
from rl.model.attention import Packed, check_supported, linear_layers
from rl.model.loading import load_weights
from rl.model.pretrained import end_token_ids, has_experts, load_config, takes_images
from rl.ranks.device import is_accelerator, zeros

if TYPE_CHECKING:
    from rl.model.vision_forward import RowImages


@dataclass
class Running:
    """A request in a slot, with its response so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # of all tokens except the newest, if recorded: [m, L, K] each
    support: list[np.ndarray] = field(default_factory=list)  # if recorded: [m, K] each

    @staticmethod
    def of(request: Request) -> "Running":
        if not (before := request.so_far):
            return Running(request)
        lists = map(list, (before.token_ids, before.log_probs, before.versions))
        support = before.support
        if support is None and (columns := request.sampling.support):
            from rl.model.sampling_mask import nothing

            support = nothing(len(before.token_ids), columns)
        records = ([] if record is None else [record] for record in (before.routes, support))
        return Running(request, *lists, *records)

    @property
    def in_kv(self) -> tuple[int, ...]:
        """The tokens whose keys and values the next decoding step needs: all except the newest sampled one."""
        return (*self.request.prompt_ids, *self.token_ids[:-1])

    @property
    def ahead(self) -> int:
        """A token's rotary position minus its place in the sequence: an image takes fewer positions than tokens."""
        images = self.request.images
        return images.next_position - images.positions.shape[1] if images else 0

    def output(self, reason: str) -> Output:
        lists = (list(self.token_ids), list(self.log_probs), list(self.versions))
        records = (np.concatenate(record) if record else None for record in (self.routes, self.support))
        return Output(self.request.id, *lists, reason, *records)


class TransformersEngine:
    """Continuous batching over slots of a preallocated KV cache.

    A step prefills the waiting requests (each distinct prompt once: the n responses of a group share the work), then decodes
    one token for every slot. `max_length` bounds prompt + response, in tokens.
    """

    shares_memory = True

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
        records_routes: bool = False,
    ):
        check_supported(load_config(model_path, trust_remote_code).get_text_config(), f"--model {model_path}", max_length)
        self.model = load_weights(model_path, dtype, trust_remote_code, say=False)
        self.model.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        self.dtype = dtype
        self.sleeps = is_accelerator(self.device)
        self.max_length = max_length
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.eos = end_tokens or end_token_ids(model_path, trust_remote_code=trust_remote_code)
        self.has_fast_path = has_fast_path(self.model)
        self.takes_images = takes_images(self.model.config)
        if self.takes_images:
            from rl.model.vision_forward import embed_by_product

            embed_by_product(self.model)
        if linear_layers(self.model.config):
            from rl.model.hybrid.states import carry

            carry(self.model, f"--model {model_path}")
        self.router = None
        if has_experts(self.model.config):
            from rl.model.router import Router

            self.router = Router.of(self.model)
        self.records_routes = self.router is not None and records_routes
        self.version = -1
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []  # running[a] is in slot a
        self.cache: KVCache | None = None
        # Per slot. `uniform` has a request's random numbers, one per token, which only depend on its seed.
        self.position = torch.zeros(max_num_seqs, dtype=torch.long, device=self.device)  # of the newest token
        self.token = torch.zeros(max_num_seqs, dtype=torch.long, device=self.device)  # the newest token, not yet in the KV
        self.uniform = torch.zeros(max_num_seqs, max_length, device=self.device)

    # -- the contract

    def add(self, request: Request) -> None:
        check_length(request, self.max_length)
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
            position = self.position[:rows]
            if self.takes_images:
                position = position + torch.tensor([row.ahead for row in self.running]).to(self.device)
            hidden = self._forward(self.token[:rows], position, layout)
            if self.records_routes:
                for row, routes in zip(self.running, self._routes([1] * rows), strict=True):
                    row.routes.append(routes)
            finished += self._sample(hidden, 0)
        return finished

    def unfinished(self) -> list[Output]:
        rows = [*self.running, *(Running.of(request) for request in self.waiting)]
        return [row.output("unfinished") for row in rows]

    def tokens_of(self, ids: Collection) -> dict[object, list[int]]:
        return {row.request.id: row.token_ids for row in self.running if row.request.id in ids}

    def abort(self) -> None:
        self.waiting.clear()
        self.running.clear()

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int, recompute_kv: bool = False) -> None:
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        for name, tensor in checked(weights, shapes):
            if (target := self._parameters[name]).data_ptr() != tensor.data_ptr():
                target.copy_(tensor)
        self.version = version
        if recompute_kv:
            self._recompute_kv()

    def read_back(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def share_parameters(self, memory: dict[str, torch.Tensor]) -> None:
        """Move the parameters into these tensors: who writes there changes the weights, and `update` has nothing to copy."""
        for name, parameter in self._parameters.items():
            memory[name].copy_(parameter)
            parameter.data = memory[name]

    def sleep(self) -> None:
        """Free the KV cache while the learner works, except on a CPU; only between responses."""
        if self.num_unfinished:
            raise RuntimeError(f"the engine cannot sleep with {self.num_unfinished} unfinished responses")
        if self.sleeps:
            self.cache = None

    # -- mechanics

    @functools.cached_property
    def _parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name; tied ones appear once, as in what the learner sends."""
        return dict(self.model.named_parameters())

    def _kv(self) -> "KVCache":
        if self.cache is None:
            config = self.model.config.get_text_config()
            self.cache = KVCache(config, self.max_num_seqs, self.max_length, self.dtype, self.device)
        return self.cache

    def _longest(self) -> int:
        """Return the largest position among the running requests."""
        return max(len(r.request.prompt_ids) + len(r.token_ids) for r in self.running) - 1

    def _forward(self, token: torch.Tensor, position: torch.Tensor, layout, images: "RowImages | None" = None) -> torch.Tensor:
        """token [T], position [T], or [3, 1, T] for a row that may have images -> hidden states [T, hidden]."""
        if self.router:
            self.router.begin(layout)
        if self.has_fast_path and position.dim() == 1:
            return hidden_states(self.model, token, position, layout)
        if self.takes_images:
            from rl.model import vision_forward

            return vision_forward.hidden_states(self.model.model, layout, token[None], position.expand(3, 1, -1), images)
        rows = {"input_ids": token[None], "position_ids": position[None]}
        return self.model.model(**rows, use_cache=False, layout=layout)[0][0]

    def _admit(self) -> list[Output]:
        """Move waiting requests to free slots, within the prefill's token budget, and sample their first tokens. Requests that
        continue a response have these already; they are admitted separately from the others."""
        first = len(self.running)
        tokens = 0
        sequences: dict[tuple, int] = {}  # key of a sequence to prefill -> its number
        leaders: list[int] = []  # sequence's number -> the first slot that needs it
        number: list[int] = []  # the sequence's number for each new slot
        while self.waiting and len(self.running) < self.max_num_seqs:
            row = Running.of(self.waiting[0])
            if leaders and bool(row.token_ids) != bool(self.running[first].token_ids):
                break
            needed = row.in_kv
            key = (row.request.images and row.request.images.digest, *needed)  # equal tokens may have different images
            length = len(needed)
            if key not in sequences:
                if leaders and tokens + length > self.max_num_batched_tokens:
                    break
                tokens += length
                sequences[key] = len(leaders)
                leaders.append(len(self.running))
            number.append(sequences[key])
            random = np.random.Generator(np.random.Philox(row.request.seed))
            random = random.random(row.request.sampling.max_tokens, np.float32)
            self.uniform[len(self.running), : len(random)] = torch.from_numpy(random)
            self.running.append(row)
            self.waiting.popleft()
        return self._begin(first, leaders, number) if leaders else []

    def _begin(self, first: int, leaders: list[int], number: list[int]) -> list[Output]:
        """Prefill the slots from `first` on and sample their first tokens. number: for each of these slots, the index in
        `leaders` of the slot with the same sequence; only the leaders' sequences are computed."""
        hidden = self._prefill(leaders)
        rows = self.running[first:]
        slots = slice(first, len(self.running))
        if self.records_routes:
            routes = self._routes([len(self.running[slot].in_kv) for slot in leaders])
            for row, i in zip(rows, number, strict=True):
                known = sum(map(len, row.routes))  # tokens that an environment added have no routes yet
                row.routes = [*row.routes, routes[i][known:]] if known < len(row.in_kv) else row.routes
        copies = [(leaders[i], slot) for slot, i in enumerate(number, start=first) if slot != leaders[i]]
        if copies:
            source, target = torch.tensor(copies).T.to(self.device)
            self._kv().copy_slots(source, target, max(len(self.running[slot].in_kv) for slot in leaders))
        if rows[0].token_ids:
            self.token[slots] = torch.tensor([r.token_ids[-1] for r in rows]).to(self.device)
            self.position[slots] = torch.tensor([len(r.in_kv) for r in rows]).to(self.device)
            return []
        self.position[slots] = torch.tensor([len(r.in_kv) - 1 for r in rows]).to(self.device)
        return self._sample(hidden[torch.tensor(number).to(self.device)], first)

    def _prefill(self, slots: list[int]) -> torch.Tensor:
        """Fill the slots' KV with their requests' tokens so far. Return each last token's hidden state [S, hidden]."""
        rows = [self.running[slot] for slot in slots]
        sequences = [row.in_kv for row in rows]
        layout = PrefillLayout([len(s) for s in sequences], slots, self._kv(), self.device)
        ids = torch.tensor([token for s in sequences for token in s]).to(self.device)
        position = layout.position_ids
        images = None
        if self.takes_images:
            from rl.model.vision_forward import row_inputs

            inputs = row_inputs(layout.lengths, [-1] * len(rows), [row.request.images for row in rows])
            position = inputs["position_ids"].to(self.device)
            images = inputs["images"] if inputs["images"].files else None
        return self._forward(ids, position, layout, images)[layout.last]

    def _routes(self, lengths: list[int]) -> list[np.ndarray]:
        """Return the routes of the last forward pass, [m, L, K] for each run of m tokens."""
        from rl.model.router import as_record

        record = as_record(self.router.chosen(), self.router.experts)
        return np.split(record, np.cumsum(lengths)[:-1])

    def _recompute_kv(self) -> None:
        lengths = [len(r.in_kv) for r in self.running]
        start = 0
        while start < len(lengths):
            end = start
            tokens = 0
            while end < len(lengths) and (end == start or tokens + lengths[end] <= self.max_num_batched_tokens):
                tokens += lengths[end]
                end += 1
            self._prefill(list(range(start, end)))
            start = end

    def _sample(self, hidden: torch.Tensor, first: int) -> list[Output]:
        """Sample the next token of slots first.. from their hidden states [n, hidden]; free the slots that finished."""
        rows = self.running[first:]
        counts = torch.tensor([len(r.token_ids) for r in rows]).to(self.device)
        uniform = self.uniform[first : len(self.running)].gather(1, counts[:, None]).squeeze(1)
        token, log_prob, support = sample(self.model.lm_head(hidden), uniform, [r.request.sampling for r in rows])
        if support is not None:
            for row, record in zip(rows, support.tolist(), strict=True):
                if row.request.sampling.support:
                    row.support.append(np.array([record], np.int32))
        self.token[first : len(self.running)] = token
        self.position[first : len(self.running)] += 1
        finished: dict[int, str] = {}
        for slot, (row, t, lp) in enumerate(zip(rows, token.tolist(), log_prob.tolist(), strict=True), start=first):
            row.token_ids.append(t)
            row.log_probs.append(lp)
            row.versions.append(self.version)
            s = row.request.sampling
            if (t in self.eos and not s.ignore_eos) or (s.stop and s.stop.complete(row.token_ids, row.request.turn)):
                finished[slot] = "stop"
            elif len(row.token_ids) >= s.max_tokens:
                finished[slot] = "length"
        outputs = [self.running[slot].output(reason) for slot, reason in finished.items()]
        self._free(finished)
        return outputs

    def _free(self, slots: Collection[int]) -> None:
        """Move the last responses into the freed slots, so that the slots in use stay 0..A-1."""
        left = len(self.running) - len(slots)
        holes = [slot for slot in sorted(slots) if slot < left]
        movers = [slot for slot in range(left, len(self.running)) if slot not in slots]
        for hole, mover in zip(holes, movers, strict=True):
            self.running[hole] = self.running[mover]
        del self.running[left:]
        if holes:
            source = torch.tensor(movers).to(self.device)
            target = torch.tensor(holes).to(self.device)
            for state in (self.position, self.token, self.uniform):
                state[target] = state[source]
            self._kv().copy_slots(source, target, self._longest() + 1)


class KVCache:
    """One tensor [layers, 2, slots, H_kv, length, D]. Slots 0..A-1 are in use, without holes: a decoding step uses a plain
    slice, and the last response moves to a slot that is freed. On a CPU, unused parts take no memory. Layers with a recurrent
    state are not in the tensor, but in `states`."""

    def __init__(self, config, slots: int, max_length: int, dtype: torch.dtype, device: torch.device):
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        linear = linear_layers(config)
        self.states = None
        if linear:
            from rl.model.hybrid.states import States

            self.states = States(config, slots, dtype, device)
        attending = [layer for layer in range(config.num_hidden_layers) if layer not in linear]
        self.number = {layer: number for number, layer in enumerate(attending)}
        self.shape = (len(attending), 2, slots, heads, max_length, dim)
        on_device = is_accelerator(device)
        self.data = torch.zeros(self.shape, dtype=dtype, device=device) if on_device else zeros(self.shape, dtype)

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots source [n] to slots target [n]."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]
        if self.states:
            self.states.copy_slots(source, target)


class PrefillLayout(Packed):
    """Packed prompts that write their keys and values to the cache: sequence i to slot slots[i]."""

    def __init__(self, lengths: list[int], slots: list[int], cache: KVCache, device: torch.device):
        super().__init__(lengths, device)
        self.cache = cache
        self.slot = torch.tensor(slots).repeat_interleave(torch.tensor(lengths)).to(device)  # [T]
        self.last = torch.tensor(self.begins[1:]).to(device) - 1  # [S]: each sequence's last token
        if cache.states:
            from rl.model.hybrid.states import FillingChain

            self.chain = FillingChain(lengths, slots, cache.states)

    def attend(self, layer: int, query, key, value, scaling: float) -> torch.Tensor:
        number = self.cache.number[layer]
        self.cache.data[number, 0, self.slot, :, self.position_ids] = key
        self.cache.data[number, 1, self.slot, :, self.position_ids] = value
        return super().attend(layer, query, key, value, scaling)


class DecodeLayout:
    """One new token for each of the first A slots, at position position[a]."""

    def __init__(self, position: torch.Tensor, longest: int, cache: KVCache):
        self.cache, self.position, self.longest = cache, position, longest  # longest: tokens after this step
        self.chain = cache.states
        self.row = torch.arange(len(position), device=position.device)
        later = torch.arange(longest, device=position.device)[None] > position[:, None]  # [A, L]
        # a mask of numbers, because a boolean one would be converted in every layer
        mask = torch.zeros(later.shape, dtype=cache.data.dtype, device=position.device)
        self.mask = mask.masked_fill_(later, -torch.inf)[:, None, None]  # [A, 1, 1, L]

    def attend(self, layer: int, query, key, value, scaling: float) -> torch.Tensor:
        """query [A, H, D]; key, value [A, H_kv, D] -> [A, H, D]."""
        rows = len(self.position)
        keys, values = self.cache.data[self.cache.number[layer], :, :rows, :, : self.longest]  # [A, H_kv, L, D] each
        keys[self.row, :, self.position] = key
        values[self.row, :, self.position] = value
        # Query heads that share a key head are put in the query's length dimension, so that no key is copied for them.
        grouped = query.view(rows, key.shape[1], -1, query.shape[2])  # [A, H_kv, H / H_kv, D]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scaling)
        return out.reshape(query.shape)


FAMILIES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
FAMILIES |= {"Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"}  # rows without images


def has_fast_path(model) -> bool:
    config = model.config.get_text_config()
    biased = getattr(config, "mlp_bias", False)
    return type(model).__name__ in FAMILIES and config.hidden_act == "silu" and not biased


def hidden_states(model, token: torch.Tensor, position: torch.Tensor, layout) -> torch.Tensor:
    """token, position [A] -> hidden states [A, hidden] that predict the next tokens; `layout` keeps the keys and values. All
    tokens are text, so even a model that takes images has one position per token."""
    base = getattr(model.model, "language_model", model.model)
    rows = len(token)
    x = F.embedding(token, base.embed_tokens.weight)  # [A, hidden]
    cos, sin = _angles(base.rotary_emb, x, position[:, None])  # [A, 1, D] each
    half = cos.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    for number, layer in enumerate(base.layers):
        attention, mlp = layer.self_attn, layer.mlp
        h = _norm(x, layer.input_layernorm)
        q, k, v = (_linear(h, p).view(rows, -1, cos.shape[-1]) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        if hasattr(attention, "q_norm"):
            q, k = _norm(q, attention.q_norm), _norm(k, attention.k_norm)
        heads = q.shape[1]
        both = torch.cat([q, k], dim=1)  # [A, H + H_kv, D]
        swapped = torch.cat([both[..., half:], both[..., :half]], dim=-1)
        both = torch.addcmul(both * cos, swapped, sin)
        out = layout.attend(number, both[:, :heads], both[:, heads:], v, attention.scaling)  # [A, H, D]
        x = _add_linear(x, out.flatten(1), attention.o_proj)
        h = _norm(x, layer.post_attention_layernorm)
        h = F.silu(_linear(h, mlp.gate_proj), inplace=True).mul_(_linear(h, mlp.up_proj))
        x = _add_linear(x, h, mlp.down_proj)
    return _norm(x, base.norm)


def _angles(rotary, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotation's cosines and sines [A, 1, D] at position [A, 1]. For Qwen2.5-VL, transformers before 5.6 takes and
    returns three per token, which are equal for text."""
    if type(rotary).__name__ != "Qwen2_5_VLRotaryEmbedding" or hasattr(rotary, "recomposition_frequencies"):
        return rotary(x, position)
    cos, sin = rotary(x, position.expand(3, -1, -1))
    return cos[0], sin[0]


def _norm(x: torch.Tensor, norm) -> torch.Tensor:
    if is_accelerator(x.device):
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return (x * scale).to(x.dtype).mul_(norm.weight)


def _linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    if type(layer) is not nn.Linear:  # it has an adapter
        return layer(x)
    if _transposed_is_faster(x, layer.weight):
        out = torch.mm(layer.weight, x.t()).t()
        return out if layer.bias is None else out.add_(layer.bias)
    return F.linear(x, layer.weight, layer.bias)


def _add_linear(x: torch.Tensor, h: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    if type(layer) is not nn.Linear:
        return x + layer(h)
    if _transposed_is_faster(h, layer.weight):
        x = x + torch.mm(layer.weight, h.t()).t()
    else:
        x = torch.addmm(x, h, layer.weight.t())
    return x if layer.bias is None else x.add_(layer.bias)


def _transposed_is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether (W x^T)^T is faster than x W^T: up to 3x on a CPU, with some tens of rows (benchmarks/LOG.md)."""
    return not is_accelerator(x.device) and 16 <= x.shape[0] <= 48 and weight.numel() >= 2**16


def sample(
    logits: torch.Tensor, uniform: torch.Tensor, settings: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sample by the inverse CDF: one uniform number per token, so each request has a separate stream of random numbers.

    logits [A, V] in any precision, uniform [A] in [0, 1), settings of each row -> (token [A], log-prob of it under the sampled
    distribution [A], the record of the tokens that could be sampled or None).
    """
    temperature = torch.tensor([s.temperature for s in settings]).to(logits.device)
    greedy = temperature == 0
    logits = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    if any(s.truncates for s in settings):
        top_k, top_p, min_p = (
            torch.tensor([getattr(s, name) for s in settings]).to(logits.device) for name in ("top_k", "top_p", "min_p")
        )
        logits = _truncate(logits, top_k, top_p, min_p)
    log_probs = F.log_softmax(logits, dim=-1)
    cdf = log_probs.exp().cumsum(-1)
    last = cdf[:, -1:].contiguous()
    # right=True never picks a token of probability 0; a target rounded up to the whole sum takes the token that reaches it.
    token = torch.searchsorted(cdf, uniform[:, None] * last, right=True)
    token = torch.minimum(token, torch.searchsorted(cdf, last)).squeeze(1)
    token = torch.where(greedy, log_probs.argmax(-1), token)
    log_prob = log_probs.gather(1, token[:, None]).squeeze(1)
    if not (most := max(s.support for s in settings)):
        return token, log_prob, None
    from rl.model import sampling_mask  # late: only --keep-sampling-mask needs it

    return token, log_prob, sampling_mask.of_logits(logits, most)


def _truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set logits to -inf: those below min_p of the largest probability, then those outside the top k (k <= 0: all), then those
    outside the nucleus p. That is vLLM's order. [A, V], [A], [A], [A] -> [A, V]."""
    values, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    drop = values - values[:, :1] < min_p[:, None].log()
    drop |= (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probs = values.masked_fill(drop, -torch.inf).softmax(-1)
    drop |= probs.cumsum(-1) - probs >= top_p[:, None]  # the token that crosses p stays
    drop[:, 0] = False
    return logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)
