"""MoE routers: they choose and weigh as transformers does, and the learner and the engine record and replay their choices."""

import dataclasses
import importlib
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from helpers import MOE, make_group, plain_log_probs, relative, response_of, whole
from test_engine import drain, requests_for
from transformers import AutoModelForCausalLM

from rl.errors import UserError
from rl.generation.embedded import TransformersEngine
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, MicroBatch
from rl.learning.learner import Learner
from rl.model import router
from rl.model.router import Router, check_record
from rl.samples.group import Group

CPU = torch.device("cpu")


def router_class(name: str):
    """Return a router class of transformers by its name."""
    for module in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_5_moe"):
        found = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name, None)
        if found:
            return found


@pytest.mark.parametrize("name", sorted(router.KNOWN))
def test_a_known_router_chooses_and_weighs_as_transformers_does(name):
    """Bit for bit, each with its own rule of normalisation."""

    class Layer(torch.nn.Module):
        def __init__(self, norm_topk_prob):
            super().__init__()
            config = transformers.PretrainedConfig(
                hidden_size=16, num_experts=8, num_local_experts=8, num_experts_per_tok=3, norm_topk_prob=norm_topk_prob
            )
            self.layers = torch.nn.ModuleList([torch.nn.ModuleList([router_class(name)(config)])])

    for norm_topk_prob in (True, False):
        model = Layer(norm_topk_prob)
        gate = model.layers[0][0]
        torch.nn.init.normal_(gate.weight)
        hidden = torch.randn(40, 16)
        _, weights, experts = gate(hidden)
        Router(model)
        _, ours, chosen = gate(hidden)
        assert torch.equal(chosen, experts)
        assert torch.equal(ours, weights)


@pytest.fixture(scope="module")
def learn(models, ranks):
    """Return a learner of the tiny MoE model, on each call with other flags."""

    def make(**flags) -> Learner:
        return Learner(models["moe"], LearnerArgs(lr_warmup_steps=0, **flags), ranks, 10)

    return make


def sampled(engine: TransformersEngine, n: int = 4) -> Batch:
    """The engine's samples with their routes, as records after transport."""
    outputs, groups = drain(engine, requests_for(n=n)), {}
    for request in requests_for(n=n):
        groups.setdefault(request.id[0], []).append((request, outputs[request.id]))
    made = []
    for ticket, pairs in groups.items():
        group, p = make_group(ticket, [1] * n), len(pairs[0][0].prompt_ids)
        group.responses[:] = [dataclasses.replace(response_of(o, p), score=float(i)) for i, (_, o) in enumerate(pairs)]
        prompt = np.array(pairs[0][0].prompt_ids, np.int32)
        group = Group(ticket, prompt, "demo", group.responses, prompt_routes=pairs[0][1].routes[:p])
        made.append(Group.from_bytes(group.to_bytes()))
    return Batch.of(made)


def micro_of(batch: Batch) -> MicroBatch:
    return MicroBatch.of(batch, list(range(len(batch.lengths))), CPU)


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    out = {name: whole(p.grad).clone() for name, p in learner.policy.model.named_parameters()}
    learner.optimizer.zero_grad()
    return out


def test_the_learner_computes_what_transformers_computes(models, learn):
    """Log-probs, and gradients of every parameter, routers and experts among them; transformers' in double precision."""
    batch = Batch.of([make_group(t, [5, 9, 3], prompt=4 + t) for t in range(3)])
    learner, micro = learn(), micro_of(batch)
    log_prob = learner.forward(micro).log_prob
    weight = torch.randn(len(log_prob), generator=torch.Generator().manual_seed(0))
    (log_prob * weight).sum().backward()
    found = gradients(learner)
    model = AutoModelForCausalLM.from_pretrained(models["moe"], experts_implementation="eager").double()
    expected = torch.cat(plain_log_probs(lambda ids: model(ids).logits, batch))
    (expected * weight).sum().backward()
    torch.testing.assert_close(log_prob.double(), expected, atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        assert relative(found[name], parameter.grad) < 1e-5, name


def test_own_routes_replayed_are_the_same_bits(models, learn):
    """Log-probs and gradients of a free pass equal those of a pass that replays the free pass's choices."""
    batch = Batch.of([make_group(t, [5, 9, 3]) for t in range(3)])
    learner, micro = learn(router_replay="R2"), micro_of(batch)
    results = []
    for _ in range(2):
        log_prob = learner.forward(micro).log_prob
        log_prob.sum().backward()
        results.append((log_prob.detach(), gradients(learner)))
        micro.routes = learner.policy.router.chosen()
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(grad, results[1][1][name]) for name, grad in results[0][1].items())


def test_replay_imposes_the_experts_and_the_router_still_learns(models, learn):
    batch = Batch.of([make_group(t, [5, 9, 3]) for t in range(3)])
    learner, micro = learn(router_replay="R2"), micro_of(batch)
    free = learner.forward(micro).log_prob
    routes = (learner.policy.router.chosen() + 1) % MOE["num_experts"]  # others, and still different ones
    micro.routes = routes
    replayed = learner.forward(micro).log_prob
    assert torch.equal(learner.policy.router.chosen(), routes)
    assert (replayed - free).abs().max() > 0.01
    replayed.sum().backward()
    assert all(grad.norm() > 0 for name, grad in gradients(learner).items() if name.endswith("mlp.gate.weight"))


def test_metrics_are_those_of_a_plain_count(models, learn):
    """Over two passes, one of them free, one with other experts replayed for some tokens, in some layers."""
    learner, micro, logits, used = learn(router_replay="R2"), micro_of(Batch.of([make_group(0, [5, 9, 3])])), [], []
    for gate in learner.policy.router.gates:
        gate.register_forward_hook(lambda _, __, out: logits.append(out[0].detach().double()))
        gate.register_forward_hook(lambda _, __, out: used.append(out[2]))
    learner.forward(micro)
    tokens = micro.inputs["input_ids"].numel()
    micro.routes = learner.policy.router.chosen()  # [T, 2, 2]
    micro.routes[::3, 1] = (micro.routes[::3, 1] + 1) % MOE["num_experts"]
    micro.routes[1::5, 0] = (micro.routes[1::5, 0] + 1) % MOE["num_experts"]
    micro.routes[:, 0] = micro.routes[:, 0].flip(-1)  # the same two in another order
    micro.routes[2::3] = router.UNKNOWN
    learner.forward(micro)
    found = learner.router_metrics()
    counts = [[0] * MOE["num_experts"] for _ in range(2)]
    for layer, experts in enumerate(used):
        for expert in experts.flatten().tolist():
            counts[layer % 2][expert] += 1
    even = 2 * tokens * 2 / MOE["num_experts"]
    assert found["moe/load/max"] == pytest.approx(max(map(max, counts)) / even)
    assert found["moe/load/min"] == pytest.approx(min(map(min, counts)) / even)
    assert found["moe/load/std"] == pytest.approx(sum(np.std(of) for of in counts) / 2 / even)
    assert found["moe/never_used"] == sum(of.count(0) for of in counts)
    entropy = [float(-(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean()) for x in logits]
    assert found["moe/router_entropy"] == pytest.approx(sum(entropy) / 4, rel=1e-5)
    replayed = [t for t in range(tokens) if t % 3 != 2]
    elsewhere = [
        [set(logits[2 + layer][t].topk(2).indices.tolist()) != set(used[2 + layer][t].tolist()) for layer in (0, 1)]
        for t in replayed
    ]
    assert found["moe/replay/tokens_differ"] == pytest.approx(sum(map(any, elsewhere)) / len(replayed))
    assert found["moe/replay/choices_differ"] == pytest.approx(sum(map(sum, elsewhere)) / len(replayed) / 2)
    assert 0 < sum(map(sum, elsewhere)) < 2 * len(replayed) and learner.router_metrics() == {}


def test_recomputed_layers_take_the_experts_of_their_forward_pass(learn):
    """Also if the router would now choose other experts, which torch refuses or, worse, does not notice."""
    batch = Batch.of([make_group(t, [5, 9, 3]) for t in range(3)])
    plain, learner, micro = learn(), learn(gradient_checkpointing=True), micro_of(batch)
    plain.forward(micro).log_prob.sum().backward()
    expected, used = gradients(plain), []
    learner.forward(micro).log_prob.sum().backward()
    assert all(torch.equal(grad, expected[name]) for name, grad in gradients(learner).items())

    for layer in learner.policy.model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: used.append(inputs[1]))
        noisy = lambda forward, hidden: forward(hidden + torch.randn_like(hidden))  # noqa: E731
        layer.mlp.gate.forward = partial(noisy, layer.mlp.gate.forward)
    log_prob = learner.forward(micro).log_prob
    log_prob.sum().backward()
    assert len(used) == 4 and torch.equal(used[0], used[3]) and torch.equal(used[1], used[2]), "the last layer is first again"
    learner.forward(micro)
    assert not torch.equal(used[4], used[0]), "the noise does make others"

    first = learner.forward(micro).log_prob
    learner.forward(micro_of(Batch.of([make_group(7, [3, 3])])))
    with pytest.raises(RuntimeError, match="which has replaced its experts"):
        first.sum().backward()


def test_experts_recorded_in_bf16_bring_the_learner_nearer(models, learn):
    """It would choose others here and there; in fp32 it does not (test_agent_episodes.py)."""
    engine = TransformersEngine(models["moe"], 64, 5, dtype=torch.bfloat16, records_routes=True)
    batch = sampled(engine)
    learner, micro = learn(router_replay="R3"), micro_of(batch)
    assert micro.routes.shape == (micro.inputs["input_ids"].numel(), 2, 2)
    ends = micro.routes[:, 0, 0] == router.UNKNOWN
    assert int(ends.sum()) == len(batch.lengths), "but for each response's last token all is known"
    replayed = (learner.forward(micro).log_prob - batch.rollout_log_prob).abs().detach()
    metrics = learner.router_metrics()
    learner.args = dataclasses.replace(learner.args, router_replay="off")
    free = (learner.forward(micro).log_prob - batch.rollout_log_prob).abs().detach()
    assert metrics["moe/replay/tokens_differ"] > 0 and free.max() > 5 * replayed.max()


def test_router_logits_are_in_fp32(models):
    """A bf16 model is compared with double precision. The experts' weights have the layers' precision."""
    engine = TransformersEngine(models["moe"], 64, dtype=torch.bfloat16)
    gate, hidden = engine.router.gates[0], torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    engine.router.begin(None)
    logits, weights, _ = gate(hidden)
    assert logits.dtype == torch.float32 and weights.dtype == torch.bfloat16
    assert 1e-8 < (logits.double() - hidden.double() @ gate.weight.double().t()).abs().max() < 1e-5


def test_a_device_without_grouped_products_computes_the_same(models, learn, monkeypatch):
    micro = micro_of(Batch.of([make_group(t, [5, 9, 3]) for t in range(3)]))
    grouped = learn().forward(micro).log_prob
    monkeypatch.setattr("rl.ranks.device.kind", lambda: "npu")
    learner = learn(dtype="float32")  # auto would be bfloat16 there
    assert learner.policy.model.config._experts_implementation == "eager"
    torch.testing.assert_close(learner.forward(micro).log_prob, grouped, atol=1e-5, rtol=0)


def test_routes_that_cannot_be_are_refused():
    good = np.tile(np.array([3, 1], np.uint8), (5, 2, 1))
    check_record(good)
    twice = good.copy()
    twice[3, 1] = 4
    three = np.tile(np.array([3, 1, 3], np.uint8), (5, 2, 1))
    for bad, at in ((np.zeros_like(good), "token 0"), (twice, "token 3"), (three, "token 0")):
        with pytest.raises(UserError, match=f"{at} of a sequence .* one of them twice"):
            check_record(bad)
