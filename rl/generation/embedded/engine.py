"""The engine contract of rl/generation/engine.py over a transformers model, in this process: for the demo, tests and small
models.

Why not transformers' continuous batching: on the demo's model it has a third of the tokens/s of plain `generate()` on a fixed
batch, which this engine exceeds, and it has no seed per request (benchmarks/results/engine.md). Left out: prefix caching
between groups, tensor parallelism. The engine for those is vLLM (rl/generation/vllm/engine.py).
"""

import functools
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl.generation.embedded.decoding import DecodeLayout, KVCache, PrefillLayout, has_fast_path, hidden_states, sample
from rl.generation.engine import Output, Request, check_length, checked
from rl.model.attention import check_supported, linear_layers
from rl.model.loading import load_weights
from rl.model.pretrained import end_token_ids, has_experts, load_config, takes_images
from rl.ranks.device import is_accelerator

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
            from rl.generation.embedded.states import carry

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

    def _kv(self) -> KVCache:
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
