"""The engine contract of rl/generation/engine.py over vLLM, in this process and with this process's own step loop.

    torchrun --standalone --nproc-per-node 2 train_sync.py --engine vllm --rollout-tp 2

This file adds log-probs of the sampled distribution, a version per token, and new weights between two steps
(rl/generation/vllm/weights.py), with the KV cache of unfinished responses kept or recomputed. Left out: pipeline and expert
parallelism, and several processes per engine. docs/engines.md lists the tested versions, and remedies when memory runs out.

A request's tokens depend on its seed, never on the rank or on the other requests. On an NPU, where vLLM needs a kernel per seed
and token, they depend on the engine's random numbers and on the other requests; after each update, these numbers start from the
seeds of the requests that the engine has then (`_random_numbers`). The logits' last bits may depend on the batch. Unlike with
the embedded engine, a response therefore repeats bit for bit only if the batches repeat as well.
"""

import contextlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
import vllm
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.request import RequestStatus

from rl.errors import UserError
from rl.generation.engine import EngineArgs, Output, Request, SamplingArgs, check_length
from rl.generation.vllm.start import (
    LOGPROBS_MODE,
    check_flags,
    give_sampled_log_probs,
    place_among_ranks,
    random_state_kept,
    settings_of_states,
)
from rl.generation.vllm.weights import LiveWeights
from rl.model.attention import linear_layers
from rl.model.pretrained import empty_model, end_token_ids, load_config, takes_images
from rl.model.sampling_mask import nothing
from rl.ranks.device import empty_cache, is_accelerator, random_numbers, seeds_are_slow


@dataclass
class Pending:
    """A request inside vLLM."""

    request: Request
    inner_id: str  # vLLM's name for it
    versions: list[int] = field(default_factory=list)  # of the tokens sampled here before the newest update


class VLLMEngine:
    """`Engine` over one vLLM instance. If rollout_tp > 1, each rollout_tp consecutive ranks of the default process group share
    one: each must add the same requests in the same order, and step and update at the same points."""

    shares_memory = False

    def __init__(
        self,
        model_path: str,
        args: EngineArgs,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        end_tokens: set[int] | None = None,
        *,
        sampling: SamplingArgs = SamplingArgs(),
        records_routes: bool = False,
        sleeps: bool = True,
        by_priority: bool = False,
    ):
        """sampling: of training. records_routes: of a mixture of experts; sleeps: whether it may free its memory; by_priority:
        whether requests have one, as those of environments have."""
        self.device = torch.device(device)
        self.max_length = max_length
        self.version = -1
        # A request with a seed and a split prompt crashes vLLM 0.32 on a CPU ("CPU Generator does not use offset").
        self.splits_prompts = is_accelerator(self.device)
        check_flags(args, sampling, max_length, self.splits_prompts)
        config = load_config(model_path, trust_remote_code)
        skeleton = empty_model(config, trust_remote_code)
        expected = dict(skeleton.named_parameters())  # the names and shapes of the learner's weights
        self.eos = sorted(end_tokens or end_token_ids(model_path, trust_remote_code=trust_remote_code))
        self.sleeps = sleeps and is_accelerator(self.device)
        self.seeds = not seeds_are_slow()
        self.asleep = False
        self.images = self.routes = None
        further = {"model": model_path, "trust_remote_code": trust_remote_code}
        if takes_images(config):
            from rl.generation.vllm.images import PreparedImages

            self.images = PreparedImages(config, f"--model {model_path}")
            further |= self.images.settings(is_accelerator(self.device))
        if linear_layers(config):
            further |= settings_of_states(config, self.splits_prompts)
        if records_routes:
            from rl.generation.vllm.routes import ChosenExperts, settings_of_routes

            further |= settings_of_routes(is_accelerator(self.device))
        self.engine = self._start(self._settings(args, sampling, dtype, by_priority) | further, args)
        self.weights = LiveWeights(self.engine, expected, dtype, args.rollout_tp)
        self.read_back, self.own_part = self.weights.read_back, self.weights.own_part
        if records_routes:
            self.routes = ChosenExperts(self.engine, skeleton, not is_accelerator(self.device))
        self._scheduler = self.engine.engine_core.engine_core.scheduler
        self._pending: dict[str, Pending] = {}
        self._added = 0  # requests so far
        self._updates = 0  # in `cache_salt`, so that no prefix cache is shared across updates
        self._salts: dict[int, str] = {}  # version of the weights -> `cache_salt`
        self._stream: list[int] | None = None  # see `_random_numbers`
        self._has_stops = False  # whether requests have stop strings

    # -- the contract

    def add(self, request: Request) -> None:
        check_length(request, self.max_length)
        self._added += 1
        key = str(self._added)
        self._has_stops |= request.sampling.stop is not None
        try:
            self._pending[key] = Pending(request, self._hand_over(key, request))
        except VLLMValidationError as error:
            raise ValueError(str(error)) from None

    @property
    def num_unfinished(self) -> int:
        return len(self._pending)

    def step(self) -> list[Output]:
        if self.asleep:
            raise RuntimeError("the engine sleeps and has no weights: it must be updated before it generates")
        if not self._pending:
            return []
        with self._random_numbers():
            outputs = self.engine.step()
        ended = [self._output(out) for out in outputs if out.finished]
        return ended + self._take_completed() if self._has_stops else ended

    def unfinished(self) -> list[Output]:
        return [self._so_far(pending, "unfinished") for pending in self._pending.values()]

    def tokens_of(self, ids: Collection) -> dict[object, list[int]]:
        states = self.engine.output_processor.request_states
        found = {}
        for pending in self._pending.values():
            if pending.request.id in ids:
                before = pending.request.so_far.token_ids if pending.request.so_far else []
                found[pending.request.id] = [*before, *states[pending.inner_id].detokenizer.output_token_ids]
        return found

    def abort(self) -> None:
        self.engine.abort_request([pending.inner_id for pending in self._pending.values()], internal=True)
        self._pending.clear()

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int, recompute_kv: bool = False) -> None:
        if self.asleep:
            empty_cache()  # the learner's freed memory: an engine does not allocate through torch's allocator
            with self.weights.same_parameters():
                self.engine.wake_up(["weights"])
        for pending in self._pending.values():
            sampled = self._scheduler.requests[pending.inner_id].num_output_tokens
            pending.versions += [self.version] * (sampled - len(pending.versions))
        self.weights.load(weights)
        if self.asleep:
            empty_cache()
            self.engine.wake_up(["kv_cache"])
            self.asleep = False
        self.engine.reset_encoder_cache()
        self.version = version
        self._stream = None
        self._updates += 1
        self._salts[version] = f"v{self._updates}"
        if recompute_kv:
            self.engine.reset_prefix_cache(reset_running_requests=True)
        self._hand_over_again()

    def sleep(self) -> None:
        """Free weights and KV memory while the learner works; `update` wakes the engine. Only between responses."""
        if self.num_unfinished:
            raise RuntimeError(f"the engine cannot sleep with {self.num_unfinished} unfinished responses")
        if self.sleeps and not self.asleep:
            self.engine.sleep(level=2)  # nothing is copied to the host, because new weights will come anyway
            self.asleep = True

    # -- mechanics

    def _settings(self, args: EngineArgs, sampling: SamplingArgs, dtype: torch.dtype, by_priority: bool) -> dict[str, object]:
        """Return settings of vllm.EngineArgs."""
        return dict(
            dtype=str(dtype).removeprefix("torch."),
            # token ids go in and come out, but agents may ask for text of a JSON schema
            skip_tokenizer_init=not (by_priority and sampling.training.support),
            generation_config="vllm",  # no sampling settings except the request's
            max_model_len=self.max_length,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            enable_chunked_prefill=self.splits_prompts,
            enable_prefix_caching=True,
            gpu_memory_utilization=args.gpu_memory_utilization,
            enforce_eager=args.enforce_eager or not is_accelerator(self.device),
            use_tqdm_on_load=False,
            enable_sleep_mode=self.sleeps,
            tensor_parallel_size=args.rollout_tp,
            distributed_executor_backend="external_launcher" if dist.is_initialized() else None,
            logprobs_mode=LOGPROBS_MODE,
            scheduling_policy="priority" if by_priority else "fcfs",
            **({"max_logprobs": sampling.training.support} if sampling.training.support else {}),
            async_scheduling=False,  # otherwise a batch is in flight at an update, and its tokens get the wrong version
            disable_log_stats=True,
            seed=0,  # without effect: random numbers depend on the requests' seeds (`_hand_over`, `_random_numbers`)
        )

    def _start(self, settings: dict[str, object], args: EngineArgs) -> vllm.LLMEngine:
        with random_state_kept(), place_among_ranks(self.device):
            try:
                engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**settings))
            # RuntimeError: out of memory; AssertionError: another process freed device memory in the meantime
            except (ValueError, RuntimeError, AssertionError) as error:
                reason = str(error).strip()[:500]
                raise UserError(
                    f"--engine vllm: vLLM does not start with {settings['model']}: {reason}\n"
                    "If memory is short, lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens, or raise "
                    "--rollout-tp; docs/engines.md says which helps when. --engine embedded works without vLLM."
                ) from error
            worker = engine.model_executor.driver_worker.worker
            give_sampled_log_probs(worker.model_runner.sampler, worker.device)
        return engine

    @contextlib.contextmanager
    def _random_numbers(self):
        """Set the random numbers of one step, for requests without separate seeds. They depend on the weights' version, on the
        seeds and lengths of the requests that the engine had at the first step with these weights, and on the number of steps
        since: two engines never draw the same numbers, while tensor parallel ranks and a resumed run do."""
        if self.seeds:
            yield
            return
        if self._stream is None:
            requests = [pending.request for pending in self._pending.values()]
            self._stream = [self.version + 1, *sorted(_seed(request) for request in requests), 0]
        self._stream[-1] += 1
        state = np.random.SeedSequence(self._stream).generate_state(4)
        with random_state_kept(), random_numbers(self.device, int(state[0])):
            np.random.seed(state)  # some of vLLM's samplers draw seeds from numpy
            yield

    def _hand_over(self, key: str, request: Request) -> str:
        """Give the request to vLLM; return vLLM's name for it."""
        s = request.sampling
        so_far = request.so_far.token_ids if request.so_far else []
        params = vllm.SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            max_tokens=s.max_tokens - len(so_far),
            ignore_eos=True,  # vLLM's notion of an end token needs a tokenizer; stop_token_ids is exact
            stop_token_ids=None if s.ignore_eos else self.eos,
            seed=_seed(request) if self.seeds else None,
            logprobs=s.support,  # in addition to the sampled token's
            flat_logprobs=True,  # no dict and no object per token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            structured_outputs=StructuredOutputsParams(json=s.schema) if s.schema else None,
        )
        # KV blocks are shared between equal prompts, and across weights only if the request says so.
        ids = [*request.prompt_ids, *so_far]
        salt = self._salts.get(request.kv_version, f"v{self._updates}")
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        if request.images is not None:
            prompt = self.images.prompt(request.images, ids, salt)
        return self.engine.add_request(key, prompt, params, priority=request.priority)

    def _hand_over_again(self) -> None:
        """Give vLLM the requests that have not begun once more: with their old salt they would share KV blocks of the weights
        that were just replaced."""
        of = {key: self._scheduler.requests[pending.inner_id] for key, pending in self._pending.items()}
        waiting = [key for key, request in of.items() if request.status == RequestStatus.WAITING]
        self.engine.abort_request([self._pending[key].inner_id for key in waiting], internal=True)
        for key in waiting:
            self._pending[key].inner_id = self._hand_over(key, self._pending[key].request)

    def _so_far(self, pending: Pending, reason: str) -> Output:
        routes = self.routes and self.routes.so_far(pending.inner_id)
        state = self.engine.output_processor.request_states[pending.inner_id]
        output = self._joined(pending, state.logprobs_processor.logprobs, reason, routes)
        return replace(output, cached=state.num_cached_tokens)

    def _take_completed(self) -> list[Output]:
        """End the requests whose newest token completes a stop string, which vLLM does not know: it has no tokenizer."""
        sampled = self._scheduler.requests
        completed = [k for k, p in self._pending.items() if _completes(p.request, sampled[p.inner_id].output_token_ids)]
        outputs = [self._so_far(self._pending[key], "stop") for key in completed]
        self.engine.abort_request([self._pending.pop(key).inner_id for key in completed], internal=True)
        return outputs

    def _output(self, out: vllm.RequestOutput) -> Output:
        pending = self._pending.pop(out.request_id)
        completion = out.outputs[0]
        reason = completion.finish_reason
        if reason == "error" and pending.request.sampling.schema:  # no token of the vocabulary fits
            return pending.request.so_far or Output(pending.request.id, [], [], [], "stop")
        if reason not in ("stop", "length"):
            raise RuntimeError(f"request {pending.request.id} ended with vLLM's finish reason {reason!r}")
        routes = self.routes and self.routes.take(pending.inner_id, completion)
        reason = "stop" if _completes(pending.request, completion.token_ids) else reason
        output = self._joined(pending, completion.logprobs, reason, routes)
        return replace(output, cached=out.num_cached_tokens or 0)

    def _joined(self, pending: Pending, sampled, reason: str, routes: np.ndarray | None) -> Output:
        """Join the request's tokens so far and those sampled here. sampled: vLLM's FlatLogprobs, with one entry per token, or
        with the support's entries as well; routes: of the prompt that vLLM got, and of the tokens sampled here."""
        so_far = pending.request.so_far or Output(None, [], [], [], "unfinished")
        tokens = sampled.token_ids
        log_probs = sampled.logprobs
        support = None
        versions = [*so_far.versions, *pending.versions, *[self.version] * (len(sampled) - len(pending.versions))]
        if most := pending.request.sampling.support:
            tokens, log_probs, support = _with_support(sampled, most)
            before = nothing(len(so_far.token_ids), most) if so_far.support is None else so_far.support
            support = np.concatenate([before, nothing(len(so_far.token_ids) - len(before), most), support])
        token_ids = [*so_far.token_ids, *tokens]
        log_probs = [*so_far.log_probs, *log_probs]
        if so_far.routes is not None:
            routes = so_far.routes if routes is None else np.concatenate([so_far.routes, routes[len(so_far.routes) :]])
        if routes is not None and len(routes) != (fed := len(pending.request.prompt_ids) + len(token_ids) - 1):
            raise RuntimeError(f"request {pending.request.id}: vLLM reports the experts of {len(routes)} tokens, but got {fed}")
        return Output(pending.request.id, token_ids, log_probs, versions, reason, routes, support)


def _completes(request: Request, sampled: Sequence[int]) -> bool:
    """Return whether the last token sampled here completes a stop string."""
    stop = request.sampling.stop
    if stop is None or not sampled or not stop.may_complete(sampled[-1]):
        return False
    so_far = request.so_far.token_ids if request.so_far else []
    return stop.complete([*so_far, *sampled], request.turn)


def _seed(request: Request) -> int:
    """Return the request's seed, which depends on the length so far: a resumed response must not repeat its random numbers."""
    return request.seed ^ (len(request.so_far.token_ids) if request.so_far else 0)


def _with_support(given, most: int) -> tuple[list[int], list[float], np.ndarray]:
    """Return the sampled tokens, their log-probs, and the record [n, most] of the tokens that could be sampled
    (rl/model/sampling_mask.py). given: vLLM's FlatLogprobs of n tokens, each followed by the likeliest ones. Its log-probs are
    those of the sampled distribution, -inf outside of the support."""
    tokens, log_probs = [], []
    support = nothing(len(given), most)
    for row, start, end in zip(support, given.start_indices, given.end_indices, strict=True):
        sampled = given.token_ids[start]
        likeliest = zip(given.token_ids[start + 1 : end], given.logprobs[start + 1 : end], strict=True)
        found = list(dict.fromkeys(token for token, log_prob in likeliest if log_prob > -math.inf))
        if sampled not in found:  # more tokens are as likely as the k-th than there is room for
            found = [*found[: most - 1], sampled]
        row[: len(found)] = found
        tokens.append(sampled)
        log_probs.append(given.logprobs[start])
    return tokens, log_probs, support
