"""A trial pass finds and refuses models whose forward pass differs from that of the learner and the embedded engine.

The engine and the learner agree with each other on all of these, so that no metric of a run would show it.
"""

import pytest
import torch
import transformers
from helpers import SMALL, run_script
from transformers import AutoModelForCausalLM

from examples.demo.sums import build_tokenizer
from rl.errors import UserError
from rl.generation.embedded.engine import TransformersEngine
from rl.model.attention import check_supported
from rl.model.forward_check import check_policy
from rl.model.loading import load_weights
from rl.model.policy import Policy
from rl.model.pretrained import load_config

MIXTURE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
RIGHT = {
    "LlamaConfig": {},
    "Qwen2Config": dict(tie_word_embeddings=True),
    "Qwen3Config": dict(head_dim=16),
    "Qwen3MoeConfig": dict(head_dim=16, **MIXTURE),
    "Olmo2Config": {},
    "GemmaConfig": dict(head_dim=16),
    "PhiConfig": {},
    "MistralConfig": dict(sliding_window=64),
    "GraniteConfig": dict(logits_scaling=1.0, attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.5),
    "CohereConfig": dict(logit_scale=1.0),
}
WRONG = {  # what they have -> config, its settings, what the message names
    "scaled logits": ("GraniteConfig", dict(logits_scaling=4.0), "logits_scaling = 4.0"),
    "scaled up": ("CohereConfig", dict(logit_scale=0.25), "logit_scale = 0.25"),
    "capped attention": ("Gemma2Config", dict(head_dim=16, final_logit_softcapping=None, sliding_window=64), "soft-capping"),
    "capped logits": (
        "Gemma2Config",
        dict(head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=2.0),
        "final_logit_",
    ),
    "sinks": ("GptOssConfig", dict(head_dim=16, sliding_window=64, **MIXTURE), "sinks"),
    "heads of two sizes": ("DeepseekV3Config", {}, "DeepseekV3ForCausalLM cannot be run"),
    "no packing": ("StableLmConfig", {}, "StableLmForCausalLM cannot be run"),
    "no causality": ("Gemma3TextConfig", dict(head_dim=16, use_bidirectional_attention=True), "bidirectional_attention = True"),
}


def save(path, kind: str, dtype=torch.float32, **settings) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SMALL | settings), dtype=dtype)
    model.save_pretrained(path)
    return str(path)


def check_learner(path: str) -> None:
    check_policy(Policy(load_weights(path, torch.float32)), path)


def check_both(path: str, dtype=torch.float32) -> None:
    check_learner(path)
    TransformersEngine(path, max_length=32, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", RIGHT)
def test_models_that_are_computed_in_full_pass(tmp_path, kind, dtype):
    check_both(save(tmp_path, kind, **RIGHT[kind]), dtype)


@pytest.mark.parametrize(
    "start", [check_learner, lambda path: TransformersEngine(path, max_length=32)], ids=["learner", "engine"]
)
@pytest.mark.parametrize("case", WRONG)
def test_models_that_do_more_are_refused(tmp_path, case, start):
    kind, settings, named = WRONG[case]
    with pytest.raises(UserError, match=named):
        start(save(tmp_path, kind, **settings))


@pytest.mark.parametrize("kind", ["LlamaConfig", "MistralConfig"])
def test_a_model_with_a_forward_pass_of_its_own_is_refused(tmp_path, kind, monkeypatch):
    """Code that comes with a model may have one. The config does not show it."""
    path = save(tmp_path, kind, sliding_window=None)
    kind = getattr(transformers, kind.replace("Config", "ForCausalLM"))
    forward = kind.forward

    def scaled(self, *arguments, **options):
        out = forward(self, *arguments, **options)
        out.logits = out.logits * 1.01
        return out

    monkeypatch.setattr(kind, "forward", scaled)
    for start in (check_learner, lambda path: TransformersEngine(path, max_length=32)):
        with pytest.raises(UserError, match=r"differ from transformers' by 0\.0"):
            start(path)


def looks_back_in_the_row(module, args, out):
    """Mix the previous token of the row into each token. At the start of a response that token belongs to another response."""
    return out + 0.5 * out.roll(1, dims=1) * (torch.arange(out.shape[1]) > 0)[:, None]


def counts_from_the_row(module, args, out):
    """Learned positions, counted from the start of the row."""
    return out + torch.linspace(-1, 1, 64 * out.shape[2]).view(64, -1).sin()[: out.shape[1]]


@pytest.mark.parametrize("hook", [looks_back_in_the_row, counts_from_the_row])
@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3MoeConfig"])
def test_a_model_that_is_right_for_the_first_sequence_of_a_row_alone_is_refused(tmp_path, kind, hook):
    model = load_weights(save(tmp_path, kind, **RIGHT[kind]), torch.float32)
    check_policy(Policy(model), "x")
    model.model.embed_tokens.register_forward_hook(hook)
    with pytest.raises(UserError, match="differ from transformers' by"):
        check_policy(Policy(model), "x")


def test_one_token_that_is_wrong_is_seen(tmp_path):
    model = load_weights(save(tmp_path, "LlamaConfig"), torch.float32)

    class Last(Policy):
        def forward(self, *args):
            log_prob, entropy = super().forward(*args)
            log_prob[-1] += 0.02
            return log_prob, entropy

    with pytest.raises(UserError, match=r"by 0\.02 \(0\.01 is allowed"):
        check_policy(Last(model), "x")


class NotANumber(Policy):
    def forward(self, *args):
        log_probs, *others = super().forward(*args)
        return (log_probs * torch.nan, *others)


def test_not_a_number_is_not_within_the_tolerance(tmp_path):
    model = load_weights(save(tmp_path, "LlamaConfig"), torch.float32)
    with pytest.raises(UserError, match="differ from transformers' by nan"):
        check_policy(NotANumber(model), "x")
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="its log-probs are NaN, as transformers computes them"):
        check_policy(Policy(model), "x")


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


@pytest.mark.parametrize("settings", [dict(use_sliding_window=False), dict(sliding_window=None, use_sliding_window=True)])
def test_a_window_that_is_turned_off_is_none(settings):
    check_supported(transformers.Qwen2Config(**SMALL | dict(sliding_window=16) | settings), "x", longest=10**6)


def test_a_window_that_the_config_does_not_tell_ends_the_run_when_a_sequence_outgrows_it(tmp_path):
    model = load_weights(save(tmp_path, "MistralConfig", sliding_window=16), torch.float32)
    check_policy(Policy(model), "x")  # 16 tokens
    model.config.sliding_window = 15
    with pytest.raises(UserError, match="15 tokens"):
        check_policy(Policy(model), "x")


def test_layers_of_another_kind_are_refused():
    """Those that config.json calls linear attention are judged by their class (test_delta_net.py)."""
    config = transformers.LlamaConfig(**SMALL)
    config.layer_types = ["conv", "full_attention"]
    with pytest.raises(UserError, match="of type conv"):
        check_supported(config, "x", longest=8)


def test_queries_scaled_by_their_place_in_the_row_are_refused():
    """Llama 4 scales them beyond token 8,192 of a row, even if all its sequences are short."""
    config = transformers.Llama4TextConfig(**SMALL | {"num_hidden_layers": 4}, layer_types=["full_attention"] * 4)
    with pytest.raises(UserError, match=r"attn_temperature_tuning.*below 8192 tokens"):
        check_supported(config, "x", longest=16)
    config.attn_temperature_tuning = False
    check_supported(config, "x", longest=16)


def test_layers_with_heads_of_two_sizes_are_refused():
    sizes = dict(head_dim=16, global_head_dim=32, layer_types=["sliding_attention", "full_attention"], sliding_window=64)
    config = transformers.Gemma4TextConfig(**SMALL | sizes)
    with pytest.raises(UserError, match="its layers differ in head_dim"):
        check_supported(config, "x", longest=16)


def test_rotary_embeddings_that_depend_on_the_batch_are_refused_beyond_their_first_range():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for rope in ({"rope_type": "longrope", **factors}, {"rope_type": "dynamic", "factor": 4.0}):
        rope |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}
        config = transformers.LlamaConfig(**SMALL, rope_parameters=rope)
        check_supported(config, "x", longest=64)
        with pytest.raises(UserError, match=f"{rope['rope_type']}.*beyond 64 tokens"):
            check_supported(config, "x", longest=65)


@pytest.mark.parametrize("script", ["train_sync.py", "train_one_step_off.py", "train_async.py"])
def test_a_script_ends_with_the_reason(tmp_path, script):
    path = save(tmp_path / "model", "GraniteConfig", logits_scaling=4.0)
    build_tokenizer().save_pretrained(path)
    flags = ["--model", path, "--total-training-steps", 1, "--output-dir", tmp_path / "runs"]
    done = run_script(script, *flags, ranks=None if script == "train_sync.py" else 2, check=False, timeout=120)
    assert done.returncode == 1 and done.stderr.count("error:") == 1
    assert "differ from transformers' by" in done.stderr and "logits_scaling = 4.0" in done.stderr


def test_the_check_costs_a_run_nothing_but_time(demo_model):
    """The check changes neither random numbers nor settings, so training is bit for bit the same."""
    model = load_weights(demo_model, torch.float32)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    check_policy(Policy(model), demo_model)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert model.config._attn_implementation == load_weights(demo_model, torch.float32).config._attn_implementation != "eager"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert load_config(demo_model).model_type == "qwen2"
