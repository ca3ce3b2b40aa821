"""A model that mixes sequences of a packed row is refused at the start.

transformers runs each sequence by itself, so nothing in the model's config or in a metric would show it.
"""

import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import DELTA, SMALL
from test_forward_check import MIXTURE, check_learner, save
from tiny_vlm import save_vlm
from transformers import AutoModelForCausalLM

from examples.demo.sums import build_tokenizer
from rl.data.image_prompts import FAMILIES, takes_images
from rl.errors import UserError
from rl.generation.embedded.engine import TransformersEngine
from rl.model import forward_check
from rl.model.attention import ATTENTION
from rl.model.forward_check import PROMPT, RESPONSE, check_policy
from rl.model.loading import load_weights
from rl.model.policy import Policy
from rl.model.pretrained import check_model

CROSSES = r"differ from transformers' by .*reaches from one sequence into the next"
MODELS = {"LlamaConfig": {}, "Qwen3MoeConfig": dict(head_dim=16, **MIXTURE)}
LONGROPE = dict(rope_type="longrope", short_factor=[1.0 + i / 4 for i in range(8)], long_factor=[9.0] * 8, rope_theta=1e4)


def shifted(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    """x [B, T, C] -> what is this many tokens earlier in each row, zeros where there is nothing."""
    return F.pad(x, (0, 0, by, 0))[:, : x.shape[1]]


def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 0.5 * shifted(x)


def convolution(x: torch.Tensor) -> torch.Tensor:
    """Causal, four tokens wide."""
    return F.silu(sum(weight * shifted(x, by) for by, weight in enumerate((1.0, 0.4, -0.3, 0.2))))


def decay(x: torch.Tensor, segments: list[tuple[int, int, int]], keep: float = 0.8) -> torch.Tensor:
    """A state that decays, over segments (begin, end, the one whose last state they begin with, or -1)."""
    states, out = [], torch.empty_like(x)
    for begin, end, before in segments:
        state = states[before] if before >= 0 else torch.zeros_like(x[:, 0])
        for t in range(begin, end):
            state = keep * state + (1 - keep) * x[:, t]
            out[:, t] = state
        states.append(state)
    return x + out


def state(x: torch.Tensor) -> torch.Tensor:
    return decay(x, [(0, x.shape[1], -1)])


def of_row(*before: int):
    """A state in the packed row of the check, whose six segments begin with the last state of these segments."""

    def run(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            return state(x)
        ends = torch.tensor([PROMPT, RESPONSE, RESPONSE] * 2).cumsum(0).tolist()
        return decay(x, list(zip([0, *ends], ends, before, strict=False)))

    return run


LEAKS = {
    "shift": shift,
    "convolution": convolution,
    "state": state,
    "state that only prompts reset": of_row(-1, 0, 1, -1, 3, 4),
    "state that only responses take over": of_row(-1, 0, 0, 2, 3, 3),
    "first prompt's state for all": of_row(-1, 0, 0, -1, 0, 0),
}


def changed(model, leak, layers: slice):
    """The model with the leak in front of these layers' MLPs."""
    for layer in model.model.layers[layers]:
        layer.mlp.register_forward_pre_hook(lambda _, args: (leak(args[0]), *args[1:]))
    return model


LAYERS = {"all layers": slice(None), "the first": slice(0, 1), "the last": slice(-1, None)}
CASES = [(leak, layers) for leak in LEAKS for layers in LAYERS]
CASES.remove(("state that only responses take over", "the last"))  # nobody sees what prompts get there


@pytest.mark.parametrize(("leak", "layers"), CASES)
@pytest.mark.parametrize("kind", MODELS)
def test_what_crosses_sequences_is_refused(tmp_path, kind, leak, layers):
    """In the last layer a shift reaches only one token of each response."""
    model = load_weights(save(tmp_path, kind, **MODELS[kind]), torch.float32)
    check_policy(Policy(model), "x")
    with pytest.raises(UserError, match=CROSSES):
        check_policy(Policy(changed(model, LEAKS[leak], LAYERS[layers])), "x")


@pytest.mark.parametrize("kind", MODELS)
def test_a_state_that_follows_the_sequences_passes(tmp_path, kind):
    """Each response begins with the state of its prompt: what is refused above is the leak, not the state."""
    model = load_weights(save(tmp_path, kind, **MODELS[kind]), torch.float32)
    check_policy(Policy(changed(model, of_row(-1, 0, 0, -1, 3, 3), slice(None))), "x")


def test_the_engine_refuses_them_too(tmp_path, monkeypatch):
    """The engine decodes one token at a time, without state of the tokens before it."""
    mlp = transformers.models.mistral.modeling_mistral.MistralMLP
    forward = mlp.forward
    path = save(tmp_path, "MistralConfig", sliding_window=None)
    TransformersEngine(path, max_length=32)
    for leak in (shift, convolution, state):
        monkeypatch.setattr(mlp, "forward", lambda self, x, leak=leak: forward(self, leak(x)))
        with pytest.raises(UserError, match="differ from transformers' by"):
            TransformersEngine(path, max_length=32)


HYBRIDS = {
    "MiniMaxConfig": dict(head_dim=16, num_local_experts=2, layer_types=["linear_attention", "full_attention"]),
    "OlmoHybridConfig": {name: value for name, value in DELTA.items() if name != "head_dim"} | {"linear_num_value_heads": 2},
    "Lfm2Config": dict(layer_types=["conv", "full_attention"]),
}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_families_with_a_state_are_refused_by_what_they_compute(kind):
    """Without the refusal by the names of their layers, which code that comes with a model may not have."""
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SMALL | HYBRIDS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    with pytest.raises(UserError, match=r"differ from transformers' by|cannot be run on packed sequences"):
        check_policy(Policy(model), "x")


@pytest.mark.parametrize("kind", ["LlamaConfig", "Phi3Config"])
def test_long_rope_passes(tmp_path, kind):
    more = dict(rope_parameters=LONGROPE | {"original_max_position_embeddings": 128}, pad_token_id=0)
    path = save(tmp_path, kind, **more)
    check_learner(path)
    TransformersEngine(path, max_length=64)


def test_an_image_of_the_other_prompt_is_seen(tmp_path, monkeypatch):
    """Two prompts have two images: a row that gives both the first one's features is refused."""
    path = save_vlm("qwen3-vl", tmp_path)
    check_learner(path)
    plain = forward_check.row_inputs

    def first_for_all(lengths, after, images):
        return plain(lengths, after, [of and images[0] for of in images])

    monkeypatch.setattr(forward_check, "row_inputs", first_for_all)
    with pytest.raises(UserError, match="differ from transformers' by"):
        check_learner(path)


# ------------------------------------------------------------------------------------------------ models with a vision tower


BOTH = ["Emu3Config", "FuyuConfig", "Gemma3Config", "Gemma3nConfig", "Llama4Config", "MllamaConfig", "Qwen3_5Config"]
BOTH += ["Qwen3_5MoeConfig"]  # transformers has a class for text alone, too


@pytest.mark.parametrize("kind", [*BOTH, "Qwen2_5_VLConfig", "Qwen3VLConfig", "Qwen3VLMoeConfig", "LlavaConfig"])
def test_a_model_with_a_vision_tower_takes_images_whatever_else_there_is_for_its_config(kind):
    assert takes_images(getattr(transformers, kind)())


@pytest.mark.parametrize("kind", ["Qwen3_5TextConfig", "Gemma3TextConfig", "Llama4TextConfig", "LlamaConfig", "Qwen3MoeConfig"])
def test_a_model_of_text_takes_none(kind):
    assert not takes_images(getattr(transformers, kind)())


def test_code_that_comes_with_a_model_is_judged_by_its_family_and_its_tower():
    assert takes_images(types.SimpleNamespace(model_type=FAMILIES[0]))
    assert takes_images(types.SimpleNamespace(model_type="mine", vision_config={"depth": 2}))
    assert not takes_images(types.SimpleNamespace(model_type="mine", vision_config=None))
    assert not takes_images(types.SimpleNamespace())
    assert not takes_images(transformers.CLIPConfig()), "a tower alone"


@pytest.mark.parametrize("kind", ["Llama4Config", "Gemma3Config"])
def test_a_model_with_images_of_another_family_is_refused_rather_than_trained_on_text(tmp_path, kind):
    config = getattr(transformers, kind)()
    config.save_pretrained(tmp_path)
    args = types.SimpleNamespace(trust_remote_code=False, max_prompt_length=8, max_response_length=8, sequence_parallel=1)
    args.max_tokens_per_micro_batch = "auto"
    with pytest.raises(UserError, match=f"it takes images, and is a {config.model_type}. Of such models {FAMILIES[0]}"):
        check_model(str(tmp_path), build_tokenizer(), args)
