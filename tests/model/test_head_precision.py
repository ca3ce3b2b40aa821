"""--lm-head-fp32: where the model computes in bf16, the product with the head is exact, in the learner and in the engine."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import SMALL, make_group
from test_engine import drain, requests_for
from transformers import AutoModelForCausalLM, Qwen2Config

from rl.generation.embedded.engine import TransformersEngine
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.model import policy
from rl.model.router import RouterArgs


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """A model whose head is its own."""
    torch.manual_seed(0)
    path = str(tmp_path_factory.mktemp("untied"))
    AutoModelForCausalLM.from_config(Qwen2Config(**SMALL | {"tie_word_embeddings": False})).save_pretrained(path)
    return path


def learned(path: str, ranks, **flags) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest errors of a batch's log-probs and entropies, and the head's gradient, own and exact, of a weighted sum."""
    learner = Learner(path, LearnerArgs(dtype="bfloat16", **flags), ranks, 10)
    seen, forward = [], learner.policy._hidden
    learner.policy._hidden = lambda *what: seen.append(forward(*what)) or seen[-1]
    batch = Batch.of([make_group(t, [5, 7, 3]) for t in range(2)])
    (micro,) = micro_batches(batch, torch.arange(len(batch.lengths)), 1000, ranks)
    log_prob, entropy = learner.log_probs(micro, "loss")
    weight = torch.linspace(-1, 1, len(log_prob))
    (log_prob * weight + entropy * 0.3).sum().backward()
    head = learner.policy.model.lm_head.weight
    hidden = seen[0].detach()[micro.predict]
    assert head.dtype == hidden.dtype == torch.bfloat16 and log_prob.dtype == torch.float32
    w = head.detach().double().requires_grad_()
    exact = F.log_softmax(hidden.double() @ w.t(), -1)
    expected, h = exact[torch.arange(len(weight)), micro.labels], -(exact.exp() * exact).sum(-1)
    (expected * weight + h * 0.3).sum().backward()
    off = torch.stack([(log_prob - expected).abs().max(), (entropy - h).abs().max()])
    return off.detach(), head.grad.double(), w.grad


@pytest.mark.parametrize("at_once", [policy.LOGITS_AT_ONCE, 100])
def test_log_probs_and_gradient_of_the_learner(path, ranks, monkeypatch, at_once):
    """Against double precision of the same bf16 hidden states and weights; also in chunks. The gradient is rounded once."""
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", at_once)
    off, grad, expected = learned(path, ranks, lm_head_fp32=True)
    coarse, _, _ = learned(path, ranks)
    assert off.max() < 1e-5 and coarse.max() > 1e-4
    assert ((grad - expected).abs() <= 2**-8 * expected.abs() + 1e-7).all()


def test_log_probs_of_the_engine(path):
    """Logits are the exact product with the weights of each update; where all is fp32 the flag changes nothing."""
    exact = {}
    for on in (True, False):
        engine = TransformersEngine(path, max_length=64, dtype=torch.bfloat16, router=RouterArgs(lm_head_fp32=on))
        drain(engine, requests_for(n=1))
        torch.manual_seed(1)
        weights = [(name, w + 0.05 * torch.randn_like(w)) for name, w in engine.model.named_parameters()]
        engine.update(weights, version=1)
        hidden = torch.randn(30, SMALL["hidden_size"]).bfloat16()
        logits = engine._logits(hidden)
        exact[on] = float((logits.double() - hidden.double() @ engine.model.lm_head.weight.double().t()).abs().max())
        assert logits.dtype == (torch.float32 if on else torch.bfloat16)
    assert exact[True] < 1e-5 and exact[False] > 1e-3
    plain, same = (TransformersEngine(path, max_length=64, router=RouterArgs(lm_head_fp32=on)) for on in (False, True))
    outputs = [[dataclasses.astuple(o) for o in drain(engine, requests_for()).values()] for engine in (plain, same)]
    assert outputs[0] == outputs[1]
