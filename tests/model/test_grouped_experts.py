"""Experts as grouped products on an NPU, tested with a fake of torch-npu's kernel that accepts exactly what the kernel
accepts."""

import inspect
import itertools
import types

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from rl.model import grouped_experts
from rl.ranks import device


def npu_grouped_matmul(x, weight, *, group_list, group_list_type, split_item, group_type):
    """A fake of torch-npu 2.10's operator, with its shapes and documented limits: one x, one weight, row counts, one output."""
    assert len(x) == len(weight) == 1 and group_list.dtype == torch.long and (group_list_type, split_item) == (1, 3)
    (x,), (weight,) = x, weight
    assert x.dim() == 2 and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    rows, start, out = group_list.tolist(), 0, []
    if group_type == 0:
        assert weight.dim() == 3 and x.shape[1] == weight.shape[1] and sum(rows) == len(x)
        for expert, count in enumerate(rows):
            out.append(x[start : start + count].float() @ weight[expert].float())
            start += count
        return [torch.cat(out).to(x.dtype)]
    assert group_type == 2 and weight.dim() == 2 and x.shape[1] == len(weight) == sum(rows)
    for count in rows:
        part = x[:, start : start + count].float() @ weight[start : start + count].float()
        out.append(part if count else torch.full_like(part, torch.nan))  # what it leaves unwritten
        start += count
    return [torch.stack(out).to(x.dtype)]


@pytest.fixture
def kernel(monkeypatch):
    """kernel(function): torch-npu's kernel is this."""

    def make(function) -> None:
        monkeypatch.setattr(torch.ops, "npu", types.SimpleNamespace(npu_grouped_matmul=function), raising=False)

    monkeypatch.setattr(grouped_experts, "is_accelerator", lambda device: True)
    before = dict(ALL_EXPERTS_FUNCTIONS._local_mapping)
    grouped_experts.use.cache_clear()
    make(npu_grouped_matmul)
    yield make
    grouped_experts.use.cache_clear()
    ALL_EXPERTS_FUNCTIONS._local_mapping.clear()
    ALL_EXPERTS_FUNCTIONS._local_mapping.update(before)


def small_model(implementation: str) -> torch.nn.Module:
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=64, head_dim=32, **sizes, **experts)
    return AutoModelForCausalLM.from_config(config, experts_implementation=implementation)


def test_a_model_has_the_outputs_and_gradients_of_its_experts_one_after_another(kernel):
    ids, found = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1)), []
    for implementation in ("eager", grouped_experts.NAME):
        if implementation != "eager":
            assert grouped_experts.use(torch.device("cpu"))
        model = small_model(implementation)
        logits = model(ids).logits
        logits.square().mean().backward()
        found.append([logits, *(parameter.grad for parameter in model.parameters())])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


class Gated(nn.Module):
    """Experts with a gate of their own: clamped, like DeepSeek V4's, instead of SiLU."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * 16, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 16))

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.clamp(max=1.0).sigmoid() * (up.clamp(-1.0, 1.0) + 1)

    def expert(self, number, x):
        return self.down_proj[number] @ self._apply_gate(self.gate_up_proj[number] @ x)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for token, place in itertools.product(range(len(top_k_index)), range(top_k_index.shape[1])):
            out[token] += top_k_weights[token, place] * self.expert(top_k_index[token, place], hidden_states[token])
        return out


class Biased(Gated):
    """Experts in the other layout, [experts, in, out], with biases, and the gate and the rest of it in turns (gpt-oss)."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_up_proj, self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 8, 32)), nn.Parameter(torch.randn(4, 32))
        self.down_proj, self.down_proj_bias = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8))

    def _apply_gate(self, gate_up):
        return gate_up[..., ::2].sigmoid() * gate_up[..., 1::2]

    def expert(self, number, x):
        inner = self._apply_gate(x @ self.gate_up_proj[number] + self.gate_up_proj_bias[number])
        return inner @ self.down_proj[number] + self.down_proj_bias[number]


LAYOUTS = {Gated: {}, Biased: {"is_concatenated": False, "is_transposed": True, "has_bias": True}}


@pytest.mark.parametrize("experts", LAYOUTS, ids=lambda experts: experts.__name__)
def test_experts_with_a_gate_or_a_layout_of_their_own_have_their_own_values(kernel, experts):
    assert grouped_experts.use(torch.device("cpu"))
    torch.manual_seed(0)
    config = types.SimpleNamespace(_experts_implementation=grouped_experts.NAME)
    known = inspect.signature(use_experts_implementation).parameters  # transformers 5.5 has no is_concatenated
    layout = {name: value for name, value in LAYOUTS[experts].items() if name in known}
    module = use_experts_implementation(**layout)(type("Experts", (experts,), {"forward": experts.forward}))(config)
    x, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2)
    chosen = torch.tensor([[0, 1], [1, 3], [3, 0], [0, 3], [1, 0], [3, 1]])  # expert 2 has no token
    found = []
    for forward in (module.forward, lambda *inputs: experts.forward(module, *inputs)):
        module.zero_grad()
        x.grad = None
        out = forward(x, chosen, weights)
        out.square().sum().backward()
        found.append([out, x.grad, *(parameter.grad for parameter in module.parameters())])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fault", ["values", "weights' gradients", "no kernel"])
def test_a_kernel_that_is_wrong_or_missing_is_not_used(kernel, fault, monkeypatch):
    def wrong(x, weight, **how):
        out = npu_grouped_matmul(x, weight, **how)
        return [out[0].flip(0)] if how["group_type"] == (0 if fault == "values" else 2) else out

    def missing(*_, **__):
        raise NotImplementedError("Could not run 'npu::npu_grouped_matmul'")

    kernel(missing if fault == "no kernel" else wrong)
    monkeypatch.setattr(device, "kind", lambda: "npu")
    monkeypatch.setattr(torch, "device", lambda *_, real=torch.device: real("cpu"))
    with pytest.warns(UserWarning, match="npu_grouped_matmul is not used"):
        assert grouped_experts.experts_implementation() == "eager"
    assert grouped_experts.NAME not in ALL_EXPERTS_FUNCTIONS._local_mapping
    kernel(npu_grouped_matmul)
    grouped_experts.use.cache_clear()
    assert grouped_experts.experts_implementation() == grouped_experts.NAME
