"""A model whose forward pass differs from the learner's, or that mixes the sequences of a packed row, is refused at the start.

Generators compute as the learner does, so that no metric of a run would show it. Nor does the config of most of these models.
"""

import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import SMALL
from transformers import AutoModelForCausalLM

from rl.errors import UserError
from rl.model.attention import ATTENTION, check_supported
from rl.model.loading import load_weights
from rl.model.policy import TOKENS, Policy, check_policy
from rl.model.pretrained import FAMILIES, takes_images

MIXTURE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LONGROPE = dict(rope_type="longrope", short_factor=[1.0 + i / 4 for i in range(8)], long_factor=[9.0] * 8, rope_theta=1e4)
LONGROPE |= {"original_max_position_embeddings": 128}
RIGHT = {
    "LlamaConfig": dict(rope_parameters=LONGROPE),
    "Qwen2Config": dict(tie_word_embeddings=True),
    "Qwen3Config": dict(head_dim=16),
    "Qwen3MoeConfig": dict(head_dim=16, **MIXTURE),
    "Olmo2Config": {},
    "GemmaConfig": dict(head_dim=16),
    "PhiConfig": {},
    "Phi3Config": dict(rope_parameters=LONGROPE, pad_token_id=0),
    "MistralConfig": dict(sliding_window=64),
    "GraniteConfig": dict(logits_scaling=1.0, attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.5),
    "CohereConfig": dict(logit_scale=1.0),
}
DIFFERS = r"log-probs computed here differ from transformers' by"
WRONG = {  # what they have -> config, its settings, what the message says
    "scaled logits": ("GraniteConfig", dict(logits_scaling=4.0), DIFFERS),
    "scaled up": ("CohereConfig", dict(logit_scale=0.25), DIFFERS),
    "capped attention": ("Gemma2Config", dict(head_dim=16, final_logit_softcapping=None, sliding_window=64), "soft-capping"),
    "capped logits": ("Gemma2Config", dict(head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=2.0), DIFFERS),
    "sinks": ("GptOssConfig", dict(head_dim=16, sliding_window=64, **MIXTURE), "sinks"),
    "heads of two sizes": ("DeepseekV3Config", {}, "DeepseekV3ForCausalLM cannot be run"),
    "no packing": ("StableLmConfig", {}, "StableLmForCausalLM cannot be run"),
    "no causality": ("Gemma3TextConfig", dict(head_dim=16, use_bidirectional_attention=True), DIFFERS),
    "convolutions": ("Lfm2Config", dict(layer_types=["conv", "full_attention"]), ""),
}


def policy_of(kind: str, **settings) -> Policy:
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SMALL | settings)
    return Policy(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval())


@pytest.mark.parametrize("kind", RIGHT)
def test_models_that_are_computed_in_full_pass(kind):
    check_policy(policy_of(kind, **RIGHT[kind]), "x")


@pytest.mark.parametrize("case", WRONG)
def test_models_that_do_more_are_refused(case):
    kind, settings, said = WRONG[case]
    with pytest.raises(UserError, match=f"--model x: .*{said}"):
        check_policy(policy_of(kind, **settings), "x")


def test_a_forward_pass_of_the_models_own_is_refused(monkeypatch):
    """Code that comes with a model may have one."""
    policy = policy_of("LlamaConfig")
    forward = type(policy.model).forward

    def scaled(self, *arguments, **options):
        out = forward(self, *arguments, **options)
        out.logits = out.logits * 1.01
        return out

    monkeypatch.setattr(type(policy.model), "forward", scaled)
    with pytest.raises(UserError, match=rf"{DIFFERS} 0\.0"):
        check_policy(policy, "x")


# ------------------------------------------------------------------------------------------- sequences that see each other


def shifted(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    """x [B, T, C] -> what is this many tokens earlier in each row, zeros where there is nothing."""
    return F.pad(x, (0, 0, by, 0))[:, : x.shape[1]]


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


def of_row(*before: int):
    """A state in the packed row of the check, whose six segments begin with the last state of these segments."""

    def run(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            return decay(x, [(0, x.shape[1], -1)])
        ends = torch.tensor([TOKENS] * 6).cumsum(0).tolist()
        return decay(x, list(zip([0, *ends], ends, before, strict=False)))

    return run


LEAKS = {
    "shift": lambda x: x + 0.5 * shifted(x),
    "convolution": convolution,
    "state": lambda x: decay(x, [(0, x.shape[1], -1)]),
    "state that only prompts reset": of_row(-1, 0, 1, -1, 3, 4),
    "state that only responses take over": of_row(-1, 0, 0, 2, 3, 3),
    "first prompt's state for all": of_row(-1, 0, 0, -1, 0, 0),
    "learned positions in the row": lambda x: x + torch.linspace(-1, 1, 64 * x.shape[2]).view(64, -1).sin()[: x.shape[1]],
}
LAYERS = {"all layers": slice(None), "the first": slice(0, 1), "the last": slice(-1, None)}
CASES = [(leak, layers) for leak in LEAKS for layers in LAYERS]
CASES.remove(("state that only responses take over", "the last"))  # nobody sees what prompts get there


def changed(policy: Policy, leak, layers: slice) -> Policy:
    """The policy with the leak in front of these layers' MLPs."""
    for layer in policy.model.model.layers[layers]:
        layer.mlp.register_forward_pre_hook(lambda _, args: (leak(args[0]), *args[1:]))
    return policy


@pytest.mark.parametrize(("leak", "layers"), CASES)
@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3MoeConfig"])
def test_what_crosses_sequences_is_refused(kind, leak, layers):
    """In the last layer a shift reaches only one token of each response."""
    with pytest.raises(UserError, match=DIFFERS):
        check_policy(changed(policy_of(kind, **RIGHT[kind]), LEAKS[leak], LAYERS[layers]), "x")


def test_a_state_that_follows_the_sequences_passes():
    """Each response begins with the state of its prompt: what is refused above is the leak, not the state."""
    check_policy(changed(policy_of("LlamaConfig"), of_row(-1, 0, 0, -1, 3, 3), slice(None)), "x")


# ---------------------------------------------------------------------------------------------------- refused by the config


WINDOWS = [
    ("MistralConfig", dict(sliding_window=16)),
    ("Phi3Config", dict(sliding_window=16)),
    ("Qwen2Config", dict(use_sliding_window=True, max_window_layers=1, sliding_window=16)),
    ("Gemma3TextConfig", dict(sliding_window=16, head_dim=16, layer_types=["full_attention", "sliding_attention"])),
    ("Llama4TextConfig", dict(attention_chunk_size=16, layer_types=["chunked_attention", "full_attention"])),
]


@pytest.mark.parametrize(("kind", "settings"), WINDOWS, ids=[kind for kind, _ in WINDOWS])
def test_a_window_is_refused_where_sequences_outgrow_it_and_only_there(kind, settings):
    """The config shows it before the weights are read: no short forward pass would show a window of thousands of tokens."""
    config = getattr(transformers, kind)(**SMALL | settings)
    check_supported(config, "x", longest=16)
    with pytest.raises(UserError, match=r"attend to 16 tokens .*is 17"):
        check_supported(config, "x", longest=17)


def test_a_window_that_the_config_does_not_tell_ends_the_run_when_a_sequence_outgrows_it():
    policy = policy_of("MistralConfig", sliding_window=2 * TOKENS)
    check_policy(policy, "x")
    policy.model.config.sliding_window = 2 * TOKENS - 1
    with pytest.raises(UserError, match=r"--model x: .*15 tokens"):
        check_policy(policy, "x")


def llama(layers: int = 2, **more):
    return transformers.LlamaConfig(**SMALL | {"num_hidden_layers": layers}, **more)


def test_layers_that_attend_in_other_ways_are_refused():
    """Llama 4 scales queries beyond token 8,192 of a row, even if all its sequences are short."""
    config = llama()
    config.layer_types = ["conv", "full_attention"]
    with pytest.raises(UserError, match="of type conv"):
        check_supported(config, "x", longest=8)
    config = transformers.Llama4TextConfig(**SMALL | {"num_hidden_layers": 4}, layer_types=["full_attention"] * 4)
    with pytest.raises(UserError, match=r"attn_temperature_tuning.*below 8192 tokens"):
        check_supported(config, "x", longest=16)
    config.attn_temperature_tuning = False
    check_supported(config, "x", longest=16)


@pytest.mark.parametrize("rope", [LONGROPE, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}])
def test_rotary_embeddings_that_depend_on_the_batch_are_refused_beyond_their_first_range(rope):
    config = llama(rope_parameters=rope | {"original_max_position_embeddings": 64})
    check_supported(config, "x", longest=64)
    with pytest.raises(UserError, match=f"{rope['rope_type']}.*beyond 64 tokens"):
        check_supported(config, "x", longest=65)


BOTH = ["Fuyu", "Gemma3", "Llama4", "Mllama", "Qwen3_5", "Qwen3_5Moe"]  # transformers has a class for text alone, too


def test_which_models_take_images():
    """By transformers' classes; code that comes with a model is judged by its family and its tower."""
    for kind in [*BOTH, "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Llava"]:
        assert takes_images(getattr(transformers, f"{kind}Config")()), kind
    for kind in ["Qwen3_5Text", "Gemma3Text", "Llama", "Qwen3Moe", "CLIP"]:
        assert not takes_images(getattr(transformers, f"{kind}Config")()), kind
    assert takes_images(types.SimpleNamespace(model_type=FAMILIES[0]))
    assert takes_images(types.SimpleNamespace(model_type="mine", vision_config={"depth": 2}))
    assert not takes_images(types.SimpleNamespace(model_type="mine", vision_config=None))


def test_the_check_costs_a_run_nothing_but_time(demo_model):
    """The check changes neither random numbers nor settings, so training is bit for bit the same."""
    model = load_weights(demo_model, torch.float32)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    check_policy(Policy(model), demo_model)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert model.config._attn_implementation == ATTENTION
    assert all(parameter.grad is None for parameter in model.parameters())
