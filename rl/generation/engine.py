"""The contract of a generation engine, the flags of every engine, and the choice between the two that implement it:
rl/generation/embedded.py and rl/generation/vllm/engine.py.

An `Engine` takes requests (`add`), returns the responses that finished (`step`), and takes new weights between two steps
(`update`). Every sampled token has a log-prob and the version of the weights that sampled it. A request's tokens only depend on
its own seed, not on the rank that serves it or on the rest of the batch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed

from rl.errors import UserError
from rl.parts import Part
from rl.ranges import MayChange, Range
from rl.ranks.device import HOST_BACKEND
from rl.ranks.dist import Ranks, all_gather_values
from rl.ranks.launch import nodes

if TYPE_CHECKING:
    from rl.data.image_prompts import Images
    from rl.generation.stop_strings import StopStrings


@dataclass(frozen=True)
class SamplingArgs(Part):
    """Sampling of responses, in training and validation."""

    _field = "sampling"

    rollout_n: Annotated[int, Range(at_least=1)] = 8
    """Responses per prompt."""
    max_response_length: Annotated[int, Range(at_least=1)] = 8
    """Longest response, in tokens. Longer responses are cut off."""
    temperature: Annotated[float, Range(at_least=0.01, at_most=100)] = 1.0
    """Sampling temperature. The learner divides its logits by it as well."""
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Nucleus sampling; 1 turns it off. Below 1 the generator's log-probs are those of the truncated distribution: see
    --keep-sampling-mask."""
    top_k: Annotated[int, Range(at_least=1, also=-1)] = -1
    """Sample from the k likeliest tokens; -1 turns it off. The generator's log-probs are then those of the truncated
    distribution."""
    min_p: Annotated[float, Range(at_least=0, at_most=1)] = 0.0
    """Leave out tokens whose probability is below this fraction of the likeliest one's, before --top-k and --top-p; 0 turns it
    off. The generator's log-probs are then those of the truncated distribution."""
    keep_sampling_mask: bool = False
    """With --top-k and optionally --top-p and --min-p: record the tokens that could be sampled, and also compute the learner's
    log-probs over them. Without this, ratios and KL compare a truncated distribution with a full one."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, or a turn of it, also in validation. The string stays in the response: its last token is the
    one that completes it."""
    val_n: Annotated[int, Range(at_least=1)] = 1
    """Responses per validation prompt. Above 1, pass@n is also reported, and maj@n if the grader returns answers."""
    val_temperature: Annotated[float, Range(at_least=0.01, at_most=100, also=0)] = 0.0
    """Sampling temperature in validation; 0 is greedy."""
    val_top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Nucleus sampling in validation."""

    @property
    def training(self) -> "SamplingParams":
        """The sampling parameters of training."""
        recorded = 0
        if self.keep_sampling_mask:
            from rl.model.sampling_mask import most_tokens

            recorded = most_tokens(self)
        truncation = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return SamplingParams(self.temperature, **truncation, max_tokens=self.max_response_length, support=recorded)

    @property
    def validation(self) -> "SamplingParams":
        """The sampling parameters of validation."""
        return SamplingParams(self.val_temperature, self.val_top_p, max_tokens=self.max_response_length)

    def check(self, args) -> None:
        """Raise UserError if --keep-sampling-mask has no bound on the number of recorded tokens."""
        if self.keep_sampling_mask and self.top_k < 1:
            raise UserError(
                "--keep-sampling-mask records the tokens that could be sampled in each place, and --top-k bounds their number. "
                "Add it, such as --top-k 50; --top-p and --min-p may lower it further."
            )


@dataclass(frozen=True)
class EngineArgs(Part):
    """The engine."""

    _field = "engine"

    engine: MayChange[Literal["auto", "embedded", "vllm"]] = "auto"
    """Inference engine: vllm, or the embedded one, which samples with the model as transformers defines it. auto chooses vllm
    if it is installed and the device is not a CPU, and prints its choice."""
    max_num_seqs: MayChange[Annotated[int, Range(at_least=1, at_most=65_536)]] = 256
    """Responses that one engine decodes at once."""
    max_num_batched_tokens: MayChange[Annotated[int, Range(at_least=1)]] = 8192
    """Tokens in one forward pass of an engine: prompts to prefill, and with vllm also the responses' next tokens."""
    rollout_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the engine's copy of the weights; auto uses the learner's --dtype."""
    rollout_tp: MayChange[Annotated[int, Range(at_least=1)]] = 1
    """vllm: ranks that share one engine by tensor parallelism. They must be on one node."""
    gpu_memory_utilization: MayChange[Annotated[float, Range(above=0, at_most=1)]] = 0.5
    """vllm: fraction of the device's memory for the engine's weights and KV cache. In train_sync.py the engine gives it back
    while the learner works."""
    enforce_eager: MayChange[bool] = False
    """vllm: do not capture graphs or compile. Slower, but starts quickly and takes less memory. A CPU is always eager."""

    def weights_dtype(self, learner_dtype: str) -> torch.dtype:
        """Return the precision of the engine's weights, in which they are also sent."""
        return getattr(torch, learner_dtype if self.rollout_dtype == "auto" else self.rollout_dtype)


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy (log-probs are then those at temperature 1); top_k -1, top_p 1 and min_p 0 are off. The embedded
    engine reads the fields in its `_sample` and in `sample`, the vLLM engine in its `_hand_over`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    ignore_eos: bool = False
    support: int = 0  # most tokens to record that could be sampled in each place (rl/model/sampling_mask.py); 0 records none
    min_p: float = 0.0
    stop: "StopStrings | None" = None
    schema: str = ""  # vllm, with `support`: the JSON schema that the text keeps to

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out. Log-probs are then those of the truncated distribution, and the run warns about it."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class Request:
    id: object  # anything hashable; the output has the same
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int  # 64 bits; two requests with the same prompt, settings, seed and weights give the same response
    so_far: "Output | None" = None  # an unfinished response that this request continues
    images: "Images | None" = None  # of the prompt, or also of the first tokens of `so_far`: the ids include their tokens
    priority: int = 0  # the lowest goes first, if the engine has a queue and responses have several turns
    kv_version: int | None = None  # version of the weights whose KV cache may be reused for `so_far`, if it still exists
    turn: int = 0  # tokens of `so_far` before the current turn, in which stop strings are looked for


@dataclass(frozen=True)
class Output:
    """A response. The three lists have one length, n, which includes the end-of-sequence token."""

    id: object
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "unfinished"]
    routes: np.ndarray | None = None  # [prompt + n - 1, L, K] uint8 or uint16, as chosen in sampling (model/router.py)
    support: np.ndarray | None = None  # [n, K] int32, tokens that could be sampled in each place (rl/model/sampling_mask.py)
    cached: int = 0  # tokens of the prompt and `so_far` found in a prefix cache


class Engine(Protocol):
    version: int  # of the weights in use; -1 before the first update
    shares_memory: bool  # whether it has `share_parameters`

    def add(self, request: Request) -> None:
        """Take a request. Raise ValueError if its schema is none. If no token fits it, the request ends without another."""

    def step(self) -> list[Output]:
        """Sample one token for every running request; return those that finished."""

    def unfinished(self) -> list[Output]:
        """Return the outputs so far of all unfinished requests. Further requests may continue them, as `so_far`."""

    def tokens_of(self, ids: Collection) -> dict[object, list[int]]:
        """Return the tokens so far of those of these requests that have begun."""

    def abort(self) -> None:
        """Forget all unfinished requests."""

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int, recompute_kv: bool = False) -> None:
        """Load new weights between two steps. Unfinished responses continue under them, with their KV cache unchanged or
        recomputed. Raise ValueError if the weights are not exactly the model's."""

    def read_back(self, name: str) -> torch.Tensor | None:
        """Return the parameter's current value, read from the engine's live memory; on a tensor parallel rank, its part. None
        if the engine cannot report it."""

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the value that `read_back` must return if the parameter is `whole`. Not needed if the engine shares memory."""

    @property
    def num_unfinished(self) -> int: ...


class EngineRanks:
    """The ranks of the default process group that share this rank's engine (--rollout-tp): `size` consecutive ranks. All must
    add the same requests and step equally often. In a whole batch every rank knows all tickets in advance; in a stream the
    engine's first rank decides on the next action, and the others `agree`."""

    def __init__(self, ranks: Ranks, size: int):
        """Raise UserError if a node's generators cannot be divided into engines."""
        if torn := [node for node in nodes() if node.generators % size]:
            raise UserError(f"--rollout-tp {size}: an engine's ranks share a node, but {torn[0]}. Change --generators there.")
        self.size = size
        self.is_leader = ranks.rank % size == 0  # the engine's first rank decides, scores and hands over
        self.index, self.engines = ranks.rank // size, ranks.world_size // size  # this engine's number; the number of engines
        self._first = self.index * size
        self._group = None
        for first in range(0, ranks.world_size, size) if size > 1 else ():
            group = torch.distributed.new_group(range(first, first + size), backend=HOST_BACKEND)  # a collective of all engines
            self._group = group if first == self._first else self._group

    def agree(self, decision: Any) -> Any:
        """Return the first rank's decision, any JSON value, on all ranks. Tuples arrive as lists."""
        return decision if self._group is None else all_gather_values(decision, self._group)[0]


def check_length(request: Request, max_length: int) -> None:
    """Raise ValueError for a request without a prompt, or with more tokens (prompt + budget) than max_length."""
    longest = len(request.prompt_ids) + request.sampling.max_tokens
    if not request.prompt_ids or longest > max_length:
        raise ValueError(f"request {request.id}: {longest} tokens (prompt + budget) do not fit in {max_length}")


def checked(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of an update. Raise ValueError with the first name that is unknown, missing or of a wrong shape."""
    missing = set(shapes)
    for name, tensor in weights:
        if shapes.get(name) != tensor.shape:
            raise ValueError(f"weight {name} {list(tensor.shape)} does not belong to the engine's model")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise ValueError(f"the update lacks {len(missing)} weights, {sorted(missing)[0]} first")


def request_seed(seed: int, ticket: int, response: int) -> int:
    """Return a 63-bit seed for response number `response` of `ticket`, independent of the rank that serves it."""
    return int(np.random.SeedSequence((seed, ticket, response)).generate_state(1, np.uint64)[0] >> 1)
