"""Gated delta nets over packed rows: what transformers computes of each sequence by itself, values and gradients."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import DELTA, MOE, SMALL, make_group, plain_log_probs
from transformers import AutoModelForCausalLM

import train_sft
import train_sync
from examples.demo.sums import build_tokenizer
from rl import parts
from rl.errors import UserError
from rl.generation.embedded import TransformersEngine
from rl.learning.batch import Batch, MicroBatch
from rl.model import router
from rl.model.attention import ATTENTION
from rl.model.hybrid import chain, delta_net, rule
from rl.model.hybrid.chain import Chain
from rl.model.policy import Policy, check_policy
from rl.model.pretrained import check_model

EXPERTS = MOE | dict(num_experts=4, shared_expert_intermediate_size=32)
KINDS = {"Qwen3_5TextConfig": {}, "Qwen3_5MoeTextConfig": EXPERTS, "Qwen3NextConfig": EXPERTS}
PROMPTS = {1: 1, 2: 4, 3: 1, 63: 1, 64: 4, 65: 1, 200: 4}  # tokens of each prompt -> its responses


def model_of(kind: str, attention: str, dtype=torch.float32, **more):
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SMALL | DELTA | KINDS[kind] | more)
    options = {"experts_implementation": "eager"} if KINDS[kind] else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **options)
    for name, parameter in model.named_parameters():  # ones and zeros hide faults
        if name.endswith(("norm.weight", "dt_bias", "conv1d.weight")):
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.to(dtype).eval()


class Double:
    """torch with float64 under the name of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


@pytest.fixture
def in_double(monkeypatch):
    """Has transformers' code and ours compute in float64 where they ask for float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        monkeypatch.setattr(sys.modules[getattr(transformers, KINDS_OF[family]).__module__], "torch", Double())
    monkeypatch.setattr(router, "torch", Double())


KINDS_OF = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM"}


def micro_batch(
    prompts: dict[int, int] = PROMPTS, sizes: tuple[int, int] = (1, 20), longest: int = 90
) -> tuple[Batch, list[int], MicroBatch]:
    """All responses in one micro-batch, in random order: one is empty, one goes over the end of a chunk."""
    rng = np.random.default_rng(0)
    sizes = [[int(n) for n in rng.integers(*sizes, responses)] for responses in prompts.values()]
    sizes[-1][0], sizes[1][0] = longest, 0
    groups = [make_group(t, of, prompt, rng) for t, (prompt, of) in enumerate(zip(prompts, sizes, strict=True))]
    batch = Batch.of(groups)
    order = rng.permutation(len(batch.lengths)).tolist()
    return batch, order, MicroBatch.of(batch, order, torch.device("cpu"))


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def differences(kind: str, batch: Batch, order: list[int], micro: MicroBatch) -> tuple[float, float]:
    """The largest difference of a log-prob, and of a parameter's gradient relative to its norm, between the packed row and
    transformers' own model on one sequence at a time, in float64."""
    policy = Policy(model_of(kind, ATTENTION, torch.float64))
    weight = torch.randn(len(micro.index), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = policy(micro.inputs, micro.layout, micro.predict, micro.labels, 1.0, "none")[0]
    ours = gradients(policy.model, found @ weight)
    reference = model_of(kind, "eager", torch.float64)
    rows = plain_log_probs(lambda ids: reference(input_ids=ids, use_cache=False).logits, batch)
    expected = torch.cat([rows[i] for i in order])
    theirs = gradients(reference, expected @ weight)
    off = [float((ours[name] - grad).norm() / grad.norm()) for name, grad in theirs.items()]
    return float((found - expected).detach().abs().max()), max(off)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_row_is_its_sequences(kind, in_double):
    """Prompts of one token and more, around the length of a chunk and of the convolution, with one response and with four."""
    log_probs, of_gradients = differences(kind, *micro_batch())
    assert log_probs <= 1e-10 and of_gradients <= 1e-9


# ------------------------------------------------------------------------------------------------------------ mutants

RULE, CONVOLVED = chain.chunked, Chain.convolved


def with_start(change):
    """The rule with another state where segments continue one."""
    return {"chunked": lambda *rows: RULE(*rows[:5], None if rows[5] is None else change(rows[5]))}


def no_halo(self, layer, x, weight):
    return CONVOLVED(Chain(self.lengths, [-1] * len(self.lengths), self.device), layer, x, weight)


MUTANTS = {
    "no state": with_start(lambda start: None),
    "first prompt's state for all": with_start(lambda start: start[:1].expand_as(start)),
    "no halo": {"convolved": no_halo},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_start_check_refuses_what_changes_values(mutant, monkeypatch):
    check_policy(Policy(model_of("Qwen3_5TextConfig", ATTENTION)), "x")
    for name, function in MUTANTS[mutant].items():
        monkeypatch.setattr(Chain if name == "convolved" else chain, name, function)
    with pytest.raises(UserError, match="differ from transformers' by"):
        check_policy(Policy(model_of("Qwen3_5TextConfig", ATTENTION)), "x")


# ------------------------------------------------------------------------------------------------------------ the rule


def recurrence(q, k, v, decay, beta, state):
    """The gated delta rule token by token, of arXiv 2412.06464, equation 10: q, k [S, L, H, Dk], v [S, L, H, Dv], state
    [S, H, Dk, Dv]."""
    out = []
    for t in range(q.shape[1]):
        state = decay[:, t, :, None, None].exp() * state
        held = (state * k[:, t, ..., None]).sum(-2)
        state = state + k[:, t, ..., None] * (beta[:, t, :, None] * (v[:, t] - held))[..., None, :]
        out.append((state * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1), state


def written_out(q, k, *rest):
    q, k = (F.normalize(x, dim=-1, eps=1e-6) for x in (q, k))
    return recurrence(q * q.shape[-1] ** -0.5, k, *rest)


@pytest.mark.parametrize("length", [1, 63, 64, 150])
def test_the_rule_is_the_recurrence(length):
    generator = torch.Generator().manual_seed(length)
    sizes = [(2, length, 3, 8), (2, length, 3, 8), (2, length, 3, 4), (2, length, 3), (2, length, 3), (2, 3, 8, 4)]
    rows = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    rows[3], rows[4] = -F.softplus(rows[3]), rows[4].sigmoid()
    found, expected = ([x.clone().requires_grad_() for x in rows] for _ in range(2))
    for of, function in ((found, rule.chunked), (expected, written_out)):
        out, state = function(*of)
        (out.sin().sum() + state.cos().sum()).backward()
    for a, b in zip(found, expected, strict=True):  # its norm of queries and keys has its epsilon elsewhere
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
    state = rows[5].clone()
    steps = [rule.one_step(*(x[:, t] for x in rows[:5]), state) for t in range(length)]
    out, final = rule.chunked(*rows)
    torch.testing.assert_close(torch.stack(steps, 1), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


def test_layers_that_hand_down_nothing(monkeypatch):
    """transformers before 5.6 gives a delta net neither the layout nor anything else of its layer's arguments."""
    *_, micro = micro_batch({5: 2, 9: 3}, (9, 12))
    inputs = (micro.inputs, micro.layout, micro.predict, micro.labels, 1.0, "none")
    expected = Policy(model_of("Qwen3_5TextConfig", ATTENTION))(*inputs)[0]
    model = model_of("Qwen3_5TextConfig", ATTENTION)
    given = ("hidden_states", "cache_params", "attention_mask")

    def bare(net, args, kwargs):
        return args, {name: value for name, value in kwargs.items() if name in given}

    for _, net in delta_net.delta_nets(model):
        net.register_forward_pre_hook(bare, with_kwargs=True)
    assert torch.equal(Policy(model)(*inputs)[0], expected)
    check_policy(Policy(model), "x")


# ------------------------------------------------------------------------------------------------------------ refusals

FLAGS = dict(max_prompt_length=8, max_response_length=8, dtype="float32")


def checked(path, config, of="--model", **flags) -> None:
    config.save_pretrained(path)
    args = parts.make(train_sync.Args, **FLAGS | flags)
    check_model(str(path), build_tokenizer(), args, of)


OTHERS = {
    "MiniMaxConfig": dict(head_dim=16, num_local_experts=2, layer_types=["linear_attention", "full_attention"]),
    "OlmoHybridConfig": {name: value for name, value in DELTA.items() if name != "head_dim"},
    "LlamaConfig": {},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_linear_attention_is_refused_by_the_class_of_its_layers(tmp_path, kind):
    config = getattr(transformers, kind)(**SMALL | OTHERS[kind])
    if kind == "LlamaConfig":
        config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UserError, match="layers of type linear_attention are not supported unless"):
        checked(tmp_path, config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="layers of type linear_attention are not supported unless"):
        TransformersEngine(str(tmp_path), max_length=16)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"compile": True}, "--compile"),
        ({"sequence_parallel": 3}, "--sequence-parallel 3: its ranks divide the gated delta nets' 4 heads and 128 channels"),
        ({"engine": "vllm", "rollout_dtype": "float32"}, "--engine vllm: on a CPU"),
        ({"engine": "vllm", "rollout_dtype": "bfloat16"}, "with heads of 128"),
    ],
)
def test_flags_that_do_not_go_with_delta_nets_are_refused(tmp_path, flags, said):
    config = transformers.Qwen3_5TextConfig(**SMALL | DELTA)
    checked(tmp_path, config)
    wide = DELTA | dict(linear_key_head_dim=128, linear_value_head_dim=128)
    of_vllm = {"engine": "vllm", "rollout_dtype": "bfloat16"}
    checked(tmp_path / "wide", transformers.Qwen3_5TextConfig(**SMALL | wide), **of_vllm)
    with pytest.raises(UserError, match=said):
        checked(tmp_path, config, **flags)


def test_what_an_engine_cannot_do_is_refused_of_the_policy_alone(tmp_path):
    """No engine has a teacher or a critic, and a supervised start has no engine."""
    config = transformers.Qwen3_5TextConfig(**SMALL | DELTA)
    in_fp32 = {"engine": "vllm", "rollout_dtype": "float32"}
    for of in ("--teacher", "--critic-model"):
        checked(tmp_path, config, of, **in_fp32)
        with pytest.raises(UserError, match="--sequence-parallel 3"):
            checked(tmp_path, config, of, **in_fp32, sequence_parallel=3)
    with pytest.raises(UserError, match="--engine vllm: on a CPU"):
        checked(tmp_path, config, **in_fp32)
    check_model(str(tmp_path), build_tokenizer(), parts.make(train_sft.Args, max_length=16))
