"""Checks that we compute what transformers computes, by one short forward pass when the learner and the embedded engine start.

The learner packs sequences into one row, shares prompts, replaces attention and stops before the logits; the embedded engine
has a KV cache and, for some families, a forward pass of its own. A model that does something else besides (scales its logits,
caps them, has windows, sinks, biases, looks at the row's neighbours) would be trained and sampled wrongly, and no metric would
show it, because both sides agree with each other. So a few random tokens go through the model as transformers runs it, with its
own eager attention on the same parameters in the same precision, and through our code; the log-probs must be the same.

The learner is checked by its first rank, in fp32 on the CPU, before the model is sharded: what a model needs shows there to six
digits, whatever precision it then trains in. Left out: vLLM, which computes by itself, and what only shows in longer sequences:
that is refused by the config and by what each layer asks of attention (rl/attention.py).
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rl.attention import ATTENTION, REMEDY, Packed
from rl.errors import UserError
from rl.vision import Images, positions, takes_images
from rl.vision_forward import row_inputs

PROMPT, RESPONSE = 8, 8  # tokens of the probe: one prompt with two responses; an image's come on top
# Largest difference of the tokens' log-probs, by its median over a response. Right models differ by 1e-6 in fp32, and by up to
# 0.1 in bf16, mixtures of experts more on some tokens; wrong ones by 0.1 to 5.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
OF_A_TOKEN = 1e-2  # in fp32, without experts
# What a config says of a forward pass that is not computed here -> the value that asks for nothing
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
def check_policy(policy, path: str) -> None:
    """Raises UserError if the learner's log-probs are not transformers'. policy: on the CPU, not sharded, in fp32."""
    probe = Probe.of(policy.model)
    ids, prompt = probe.ids, probe.prompt
    # The prompt, the first response, the second one; and this once more with a prompt of its own, behind them.
    row, labels = torch.cat([ids[0], ids[1, prompt:], ids[1]]), ids[[0, 1, 1], prompt:]
    first = torch.arange(prompt - 1, prompt + RESPONSE - 1)  # where the first response's tokens are predicted
    predict = torch.cat([first, first[:1], first[1:] + RESPONSE, first + prompt + 2 * RESPONSE])
    lengths, after = [prompt, RESPONSE, RESPONSE, prompt + RESPONSE], [-1, 0, 0, -1]
    images = [probe.images, None, None, probe.images]
    layout = Packed(lengths, after=after)
    inputs = layout.inputs(row) | (row_inputs(lengths, after, images) if probe.images else {})

    def ours() -> torch.Tensor:
        return policy(inputs, layout, predict, labels.flatten(), 1.0, "none")[0].view(labels.shape)

    with _all_cores():
        _compare(ours, policy.model, probe, path, torch.float32)


@torch.no_grad()
def check_engine(forward: Callable[["Probe"], torch.Tensor], model, path: str, dtype: torch.dtype) -> None:
    """Raises UserError if the engine's logits are not transformers'. forward: probe -> logits [2, RESPONSE, V] that predict the
    responses' tokens."""
    probe = Probe.of(model)
    _compare(lambda: _log_probs(forward(probe), probe), model, probe, path, dtype)


@dataclass(frozen=True)
class Probe:
    """One prompt with two responses."""

    ids: torch.Tensor  # [2, L] random, on the model's device
    prompt: int  # tokens of the prompt
    images: Images | None = None  # an image in the prompt, if the model takes any
    theirs: dict = field(default_factory=dict)  # what transformers' forward takes of it

    @staticmethod
    def of(model) -> "Probe":
        config, generator = model.config, torch.Generator().manual_seed(0)  # a run's own random numbers stay what they are
        ids = torch.randint(config.get_text_config().vocab_size, (2, PROMPT + RESPONSE), generator=generator)
        ids[1, :PROMPT] = ids[0, :PROMPT]
        if not takes_images(config):
            return Probe(ids.to(model.device), PROMPT)
        image, vision = config.image_token_id, config.vision_config
        marks = {image, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
        ids[torch.isin(ids, torch.tensor(sorted(marks)))] = min(set(range(len(marks) + 1)) - marks)
        merge, half = vision.spatial_merge_size, PROMPT // 2
        ids = torch.cat([ids[:, :half], torch.full((2, 6), image), ids[:, half:]], dim=1)
        grid = torch.tensor([[1, 2 * merge, 3 * merge]])
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(int(grid.prod()), values, generator=generator)
        of_prompt, following = positions(PROMPT + 6, [half], [(2, 3)])
        images = Images(("probe",), grid, half + torch.arange(6), of_prompt, following, _Prepared(pixels, merge), (b"",))
        theirs = {"pixel_values": torch.cat([pixels] * 2), "image_grid_thw": torch.cat([grid] * 2)}
        theirs["mm_token_type_ids"] = (ids == image).int()
        theirs = {name: tensor.to(model.device) for name, tensor in theirs.items()}
        return Probe(ids.to(model.device), PROMPT + 6, images, theirs)


@dataclass(frozen=True)
class _Prepared:
    """An ImagePrep that has its pixels already."""

    made: torch.Tensor
    merge: int

    def pixels(self, digest: str, source: bytes) -> torch.Tensor:
        return self.made


def _compare(ours: Callable[[], torch.Tensor], model, probe: Probe, path: str, dtype: torch.dtype) -> None:
    """ours() -> log-probs [2, RESPONSE] of the responses' tokens; a third row is of the second response, computed otherwise."""
    try:
        found = ours()
    except UserError as error:  # from rl/attention.py
        raise UserError(f"--model {path}: {error}") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model may raise that takes other arguments, or has other shapes
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        message = f"--model {path}: {type(model).__name__} cannot be run on packed sequences ({reason}). {REMEDY}"
        raise UserError(message) from error
    with _eager(model):
        logits = model(input_ids=probe.ids, use_cache=False, **probe.theirs).logits  # [2, L, V]
    if probe.images:
        model.model.rope_deltas = None  # what transformers keeps of the positions
    expected = _log_probs(logits[:, probe.prompt - 1 : -1], probe)[[0, 1, 1][: len(found)]]
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    difference, allowed = _difference((found - expected).abs(), dtype, has_experts)
    if not difference <= allowed:  # NaN is a difference, too
        tolerance = f"{allowed:g} is allowed in {str(dtype).removeprefix('torch.')}"
        raise UserError(
            f"--model {path}: log-probs computed here differ from transformers' by {difference:.2g} ({tolerance}): the model "
            f"does more than is computed here. {_likely(model)}{REMEDY}"
        )


def _difference(gaps: torch.Tensor, dtype: torch.dtype, has_experts: bool) -> tuple[float, float]:
    """gaps [responses, RESPONSE] -> (a difference, how large it may be): that of the worst token where each must be right,
    otherwise the largest of the responses' medians. A router may round to another expert now and then."""
    if dtype == torch.float32 and not has_experts and float(gaps.max()) > OF_A_TOKEN:
        return float(gaps.max()), OF_A_TOKEN
    return float(gaps.median(dim=1).values.max()), TOLERANCE[dtype]


def _log_probs(logits: torch.Tensor, probe: Probe) -> torch.Tensor:
    """logits [2, RESPONSE, V] -> log-probs [2, RESPONSE] of the responses' tokens, fp32."""
    return logits.float().log_softmax(-1).gather(2, probe.ids[:, probe.prompt :, None]).squeeze(2)


@contextlib.contextmanager
def _eager(model):
    """Every module of the model looks into the config for its attention, at each call."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values()
    ours = [config for config in configs if getattr(config, "_attn_implementation", None) == ATTENTION]
    for config in ours:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config in ours:
            config._attn_implementation = ATTENTION


@contextlib.contextmanager
def _all_cores():
    """torchrun leaves each rank one thread; the other ranks wait for this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _likely(model) -> str:
    """The likely reason in the config, in a sentence."""
    config = model.config.get_text_config()
    found = [f"{name} = {value}" for name, plain in SUSPECTS.items() if (value := getattr(config, name, plain)) != plain]
    return f"A likely reason, from config.json: {', '.join(found)}. " if found else ""
