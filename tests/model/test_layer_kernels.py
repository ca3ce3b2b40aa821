"""--compile computes the same, compiles once, and is refused where it cannot work. Liger's kernels for norms and gates: used
where they are installed and right, by stand-ins with the arguments of liger-kernel 0.8.5 that overwrite what those do."""

import shutil
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from helpers import flat_gradient, make_group, packed_learner, relative, whole
from torch._inductor import config

from rl.errors import UserError
from rl.learning import placement
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.model import liger
from rl.model.compiled import compile_layers
from rl.model.pretrained import empty_model, load_config

compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")


def log_probs_of(learner: Learner, sizes: list[int]) -> torch.Tensor:
    """Log-probs of responses of these sizes; their gradient stays."""
    batch = Batch.of([make_group(0, sizes)])
    micros = micro_batches(batch, torch.arange(len(sizes)), 4096, learner.ranks)
    log_prob = torch.cat([learner.forward(micro).log_prob for micro in micros])
    (log_prob * torch.linspace(-1, 1, len(log_prob))).sum().backward()
    return log_prob.detach()


@compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags", "batches"),
    [("qwen2-tied", {"gradient_checkpointing": True}, ([7, 9], [20, 30, 5])), ("qwen3", {"lora_rank": 4}, ([20, 30, 5],))],
)
def test_compiled_layers_compute_the_same(models, ranks, kind, flags, batches):
    plain, compiled = (Learner(models[kind], LearnerArgs(compile=on, **flags), ranks, 1) for on in (False, True))
    for learner in (plain, compiled):
        for name, parameter in learner.policy.named_parameters():
            if name.endswith("lora_B"):
                parameter.data.fill_(0.1)
    for sizes in batches:
        assert (log_probs_of(plain, sizes) - log_probs_of(compiled, sizes)).abs().max() < 1e-5
        assert relative(flat_gradient(compiled.policy), flat_gradient(plain.policy)) < 1e-5


@compiler
@pytest.mark.slow
def test_a_layer_is_compiled_once_for_all_lengths(models, ranks):
    learner = Learner(models["qwen2-tied"], LearnerArgs(compile=True), ranks, total_steps=1)

    def graphs_after(sizes: list[int]) -> int:
        log_probs_of(learner, sizes)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    begin = graphs_after([7, 9]), graphs_after([20, 30, 5])
    assert begin[0] > 0
    assert graphs_after([11]) == graphs_after([40, 40]) == graphs_after([3, 60, 17, 8]) == begin[1]


def test_experts_are_refused(models):
    with pytest.raises(UserError, match="--compile is for models without experts"):
        compile_layers(empty_model(load_config(models["moe"]), False), models["moe"])


def test_a_missing_compiler_is_named(models):
    """torch's own patch: pytest's would delete the option at its end, and torch then has none in this process."""
    missing = config.patch({"cpp.cxx": ("/nowhere/g++",)})
    with missing, pytest.raises(UserError, match=r"--compile: there is no C\+\+ compiler"):
        compile_layers(empty_model(load_config(models["qwen3"]), False), models["qwen3"])


CPU = torch.device("cpu")


class Norm(torch.autograd.Function):
    """LigerRMSNormFunction: keeps the input and one number a row."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        assert (offset, casting_mode, in_place) == (0.0, "llama", False)
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (x.float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        unit, of_unit = x.float() * scale, (grad * weight).float()
        of_x = scale * (of_unit - unit * (of_unit * unit).mean(-1, keepdim=True))
        return of_x.to(x.dtype), (grad * unit).flatten(0, -2).sum(0).to(weight.dtype), None, None, None, None, None


class Gate(torch.autograd.Function):
    """LigerSiLUMulFunction: the gradients overwrite what was kept."""

    @staticmethod
    def forward(ctx, gate, up, gate_multiplier=1.0, down_multiplier=1.0):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        sigmoid = gate.float().sigmoid()
        of_up = grad * F.silu(gate)
        of_gate = grad.float() * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
        with torch.no_grad():
            gate.detach().copy_(of_gate)
            up.detach().copy_(of_up)
        return gate.detach(), up.detach(), None, None


def changed(kernel, change):
    """The kernel with another gradient."""

    class Changed(kernel):
        @staticmethod
        def backward(ctx, grad):
            return change(*kernel.backward(ctx, grad))

    return Changed


@pytest.fixture
def installed(monkeypatch):
    """Has the CPU take kernels as an accelerator takes Liger's."""

    def has_package(found: bool) -> None:
        util = types.SimpleNamespace(find_spec=lambda name: found or None)
        monkeypatch.setattr(liger, "importlib", types.SimpleNamespace(util=util))

    def install(norm=Norm, gate=Gate) -> None:
        for name in ("", ".ops", ".ops.rms_norm", ".ops.swiglu"):
            module = types.ModuleType(f"liger_kernel{name}")
            module.LigerRMSNormFunction, module.LigerSiLUMulFunction = norm, gate
            monkeypatch.setitem(sys.modules, module.__name__, module)
        has_package(True)
        for module in (liger, placement):
            monkeypatch.setattr(module, "is_accelerator", lambda device: True)
        liger.unused.cache_clear()

    install.has_package = has_package
    yield install
    liger.unused.cache_clear()


def replaced(learner: Learner) -> set[str]:
    return {type(module).__name__ for module in learner.policy.model.modules() if "forward" in vars(module)}


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3", "moe"])
def test_a_learner_computes_the_same_by_the_kernels(models, ranks, kind, installed):
    plain, expected = packed_learner(models[kind], ranks)
    installed()
    learner, found = packed_learner(models[kind], ranks)
    names = replaced(learner)
    assert any(name.endswith("RMSNorm") for name in names)
    assert any(name.endswith("MLP") for name in names) == (kind != "moe")
    gradients = ([whole(p.grad) for p in of.policy.parameters()] for of in (learner, plain))
    for a, b in [(found, expected), *zip(*gradients, strict=True)]:
        assert (a - b).norm() < 1e-5 * b.norm().clamp_min(1e-3)


@pytest.mark.parametrize(
    ("kernels", "why"),
    [
        ({"norm": changed(Norm, lambda x, weight, *none: (x, 2 * weight, *none))}, "its gradients of their weights differ"),
        ({"norm": changed(Norm, lambda x, weight, *none: (x * torch.nan, weight, *none))}, "its gradients of norms differ"),
        ({"gate": changed(Gate, lambda gate, up, *none: (1.05 * gate, up, *none))}, "its gradients of gates differ"),
        ({"gate": types.SimpleNamespace(apply=lambda gate, up: gate * up)}, "its gates differ from plain torch's by"),
        ({"norm": types.SimpleNamespace(apply=lambda *_: 1 / 0)}, "ZeroDivisionError: division by zero"),
        ({"norm": types.SimpleNamespace(apply=lambda x, weight: x)}, "TypeError: "),
    ],
)
def test_kernels_that_are_wrong_or_fail_are_not_used(models, ranks, kernels, why, installed, capsys):
    installed(**kernels)
    learner, _ = packed_learner(models["qwen3"], ranks)
    said = [line for line in capsys.readouterr().out.splitlines() if "liger" in line]
    assert len(said) == 1 and said[0].startswith("warning: liger-kernel is not used: ") and why in said[0]
    assert not replaced(learner)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch, installed):
    """As without Triton."""
    installed()
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rms_norm", None)
    assert liger.unused(CPU, torch.bfloat16, 32, 64).startswith("ModuleNotFoundError: ")
