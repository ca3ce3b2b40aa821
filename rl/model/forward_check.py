"""Checks that we compute what transformers computes, by one short forward pass when the learner and the embedded engine start.

The learner packs sequences into one row, shares prompts, replaces attention and stops before the logits; the embedded engine
has a KV cache and, for some families, a forward pass of its own. A model that does anything else (scales or caps its logits,
has windows, sinks, biases, or a state that crosses the borders of a row: convolutions, linear attention, shifted tokens) would
be trained and sampled wrongly, and no metric would show it, because both sides agree with each other. So a few random tokens go
through the model as transformers runs it, with its own eager attention on the same parameters in the same precision, and
through our code; the log-probs must be the same.

There are two prompts with two responses each, and each response is judged by itself: in a packed row the first response follows
its prompt anyway, so a model whose state crosses borders is right there and wrong on the others.

The first rank checks the learner, in fp32 on the CPU, before the model is sharded: there a difference shows to six digits,
whatever precision the model then trains in. Left out: vLLM, which computes by itself, and differences that only show in longer
sequences: rl/model/attention.py refuses these by the config and by the options of each layer's attention.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from rl.data.image_prompts import Images, positions, takes_images
from rl.errors import UserError
from rl.model.attention import ATTENTION, REMEDY, Packed, linear_layers
from rl.model.vision_forward import row_inputs

PROMPT, RESPONSE = 8, 8  # tokens of a probe: one prompt with two responses; an image's come on top
SEEDS = (0, 1)  # of the probes, which have one shape and different prompts
# Largest median difference of a response's log-probs. Right models differ by 1e-6 in fp32 and by up to 0.1 in bf16 (mixtures of
# experts by more on some tokens), wrong models by 0.1 to 5.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
OF_A_TOKEN = 1e-2  # in fp32; not for each token of a mixture, whose router may round to a different expert now and then
CROSSES = (
    "The first response of a packed row is right and others are not: something reaches from one sequence into the next, as a "
    "convolution, a recurrent state or a shift of tokens does. "
)
# Settings of a forward pass that is not computed here -> the value that asks for nothing
SUSPECTS = {
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
    "final_logit_softcapping": None,
    "alibi": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
}


@torch.no_grad()
def check_policy(policy, path: str, name: str = "--model") -> None:
    """Raises UserError if the learner's log-probs are not those of transformers. policy: on the CPU, not sharded, in fp32.
    name: of the flag that gave the model."""
    probes = [Probe.of(policy.model, seed) for seed in SEEDS]
    prompt = probes[0].prompt
    row = torch.cat([torch.cat([probe.ids[0], probe.ids[1, prompt:]]) for probe in probes])  # a prompt, its two responses, ...
    first = torch.arange(prompt - 1, prompt + RESPONSE - 1)  # where the first response's tokens are predicted
    of_probe = torch.cat([first, first[:1], first[1:] + RESPONSE])
    predict = torch.cat([of_probe + number * len(row) // len(probes) for number in range(len(probes))])
    lengths = [prompt, RESPONSE, RESPONSE] * len(probes)
    after = [before for number in range(len(probes)) for before in (-1, 3 * number, 3 * number)]
    images = [image for probe in probes for image in (probe.images, None, None)]
    layout = Packed(lengths, after=after)
    inputs = layout.inputs(row) | (row_inputs(lengths, after, images) if images[0] else {})
    labels = torch.cat([probe.ids[:, prompt:] for probe in probes])

    def ours() -> torch.Tensor:
        return policy(inputs, layout, predict, labels.flatten(), 1.0, "none")[0].view(labels.shape)

    with _all_cores():
        _compare(ours, policy.model, probes, f"{name} {path}", torch.float32)


@torch.no_grad()
def check_engine(forward: Callable[["Probe"], torch.Tensor], model, path: str, dtype: torch.dtype) -> None:
    """Raises UserError if the engine's logits are not those of transformers. forward: probe -> logits [2, RESPONSE, V] that
    predict the responses' tokens."""
    probes = [Probe.of(model, seed) for seed in SEEDS]
    _compare(
        lambda: torch.cat([_log_probs(forward(probe), probe) for probe in probes]), model, probes, f"--model {path}", dtype
    )


@dataclass(frozen=True)
class Probe:
    """One prompt with two responses."""

    ids: torch.Tensor  # [2, L] random, on the model's device
    prompt: int  # tokens of the prompt
    images: Images | None = None  # an image in the prompt, if the model takes any
    theirs: dict = field(default_factory=dict)  # the image as inputs of transformers' forward

    @staticmethod
    def of(model, seed: int = 0) -> "Probe":
        config = model.config
        generator = torch.Generator().manual_seed(seed)  # the run's own random numbers stay the same
        ids = torch.randint(config.get_text_config().vocab_size, (2, PROMPT + RESPONSE), generator=generator)
        ids[1, :PROMPT] = ids[0, :PROMPT]
        if not takes_images(config):
            return Probe(ids.to(model.device), PROMPT)
        image, vision = config.image_token_id, config.vision_config
        marks = {image, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
        ids[torch.isin(ids, torch.tensor(sorted(marks)))] = min(set(range(len(marks) + 1)) - marks)
        merge = vision.spatial_merge_size
        half = PROMPT // 2
        ids = torch.cat([ids[:, :half], torch.full((2, 6), image), ids[:, half:]], dim=1)
        grid = torch.tensor([[1, 2 * merge, 3 * merge]])
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(int(grid.prod()), values, generator=generator)
        of_prompt, following = positions(PROMPT + 6, [half], [(2, 3)])
        prep = SimpleNamespace(merge=merge, pixels=lambda digest, source: pixels)  # an ImagePrep that has prepared them
        images = Images((f"probe {seed}",), grid, half + torch.arange(6), of_prompt, following, prep, (b"",))
        theirs = {"pixel_values": torch.cat([pixels] * 2), "image_grid_thw": torch.cat([grid] * 2)}
        theirs["mm_token_type_ids"] = (ids == image).int()
        theirs = {name: tensor.to(model.device) for name, tensor in theirs.items()}
        return Probe(ids.to(model.device), PROMPT + 6, images, theirs)


def _compare(ours: Callable[[], torch.Tensor], model, probes: list[Probe], where: str, dtype: torch.dtype) -> None:
    """ours() -> log-probs [4, RESPONSE] of the responses' tokens, probe by probe."""
    try:
        found = ours()
    except UserError as error:  # from rl/model/attention.py, which knows no model; or from rl/model/loading.py
        raise error if where in str(error) else UserError(f"{where}: {error}") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # anything: the model may take other arguments or have other shapes
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        message = f"{where}: {type(model).__name__} cannot be run on packed sequences ({reason}). {REMEDY}"
        raise UserError(message) from error
    inputs = {name: torch.cat([probe.theirs[name] for probe in probes]) for name in probes[0].theirs}
    with _eager(model):
        logits = model(input_ids=torch.cat([probe.ids for probe in probes]), use_cache=False, **inputs).logits  # [4, L, V]
    if probes[0].images:
        model.model.rope_deltas = None  # transformers keeps this of the positions
    parts = logits[:, probes[0].prompt - 1 : -1].chunk(len(probes))
    expected = torch.cat([_log_probs(part, probe) for part, probe in zip(parts, probes, strict=True)])
    if expected.isnan().any():
        raise UserError(f"{where}: its log-probs are NaN, as transformers computes them. Take other weights.")
    gaps = (found - expected).abs()
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    for difference, allowed in _judged(gaps, dtype, has_experts):
        if not difference <= allowed:  # also true for NaN
            tolerance = f"{allowed:g} is allowed in {str(dtype).removeprefix('torch.')}"
            crosses = CROSSES if float(gaps[0].max()) <= allowed else ""
            raise UserError(
                f"{where}: log-probs computed here differ from transformers' by {difference:.2g} ({tolerance}): the "
                f"model does more than is computed here. {crosses}{_likely(model)}{REMEDY}"
            )


def _judged(gaps: torch.Tensor, dtype: torch.dtype, has_experts: bool) -> list[tuple[float, float]]:
    """gaps [4, RESPONSE] -> (a difference, the largest one allowed): the median of the worst response, and in fp32 the worst
    token. In a mixture a token counts only if both second responses are wrong at its place."""
    judged = [(float(gaps.median(dim=1).values.max()), TOLERANCE[dtype])]
    if dtype == torch.float32:
        of_token = gaps[1::2].amin(dim=0) if has_experts else gaps
        judged.append((float(of_token.max()), OF_A_TOKEN))
    return judged


def _log_probs(logits: torch.Tensor, probe: Probe) -> torch.Tensor:
    """logits [2, RESPONSE, V] -> log-probs [2, RESPONSE] of the responses' tokens, fp32."""
    return logits.float().log_softmax(-1).gather(2, probe.ids[:, probe.prompt :, None]).squeeze(2)


@contextlib.contextmanager
def _eager(model):
    """Has transformers' own attention compute the model: every module looks into its config at each call."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values()
    ours = [config for config in configs if getattr(config, "_attn_implementation", None) == ATTENTION]
    for config in ours:
        config._attn_implementation = "eager"
    plain = contextlib.nullcontext()
    if linear_layers(model.config):
        from rl.model.hybrid.delta_net import in_plain_torch

        plain = in_plain_torch(model)
    try:
        with plain:
            yield
    finally:
        for config in ours:
            config._attn_implementation = ATTENTION


@contextlib.contextmanager
def _all_cores():
    """Computes with all cores: torchrun leaves each rank one thread, and the other ranks wait for this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _likely(model) -> str:
    """A sentence about the likely reason in the config; empty if there is none."""
    config = model.config.get_text_config()
    found = [f"{name} = {value}" for name, plain in SUSPECTS.items() if (value := getattr(config, name, plain)) != plain]
    return f"A likely reason, from config.json: {', '.join(found)}. " if found else ""
