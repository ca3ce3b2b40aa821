"""MoE models in whole runs: their export, and training with and without routing replay."""

import numpy as np
import pytest
import torch
from helpers import MOE, make_group, run_script, save_for_demo
from safetensors.torch import load_file, save_file
from trainer import Trainer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import train_async
import train_sync
from rl import parts
from rl.errors import UserError
from rl.generation.make import make_generator
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, MicroBatch
from rl.learning.learner import Learner
from rl.ranges import check
from rl.rewards.pool import ScoringPool
from rl.samples.group import Group
from rl.setup import set_up


@pytest.fixture
def fused(models, tmp_path):
    """The tiny MoE model, saved with transformers' own in-memory names."""
    model = AutoModelForCausalLM.from_pretrained(models["moe"])
    model.config.save_pretrained(tmp_path / "fused")
    save_file(dict(model.named_parameters()), tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    return str(tmp_path / "fused")


@pytest.mark.runs
@pytest.mark.parametrize("form", ["hub", "fused"])
def test_the_export_has_the_hubs_names_whatever_was_read(models, fused, tmp_path, form):
    """Two learners write it, in pieces that end within experts."""
    model = models["moe"] if form == "hub" else fused
    done = run_script("tests/programs/saves.py", model, tmp_path, "whole", ranks=2, timeout=100)
    assert done.stdout.count(" continued: \n") == 2
    hub, export = (load_file(f"{where}/model.safetensors") for where in (models["moe"], tmp_path / "run" / "step_000002"))
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in hub
    assert hub.keys() == export.keys() and all(torch.equal(export[name], hub[name]) for name in hub)


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_for_demo(Qwen3MoeConfig, tmp_path_factory.mktemp("moe"), **MOE, head_dim=16, tie_word_embeddings=True)


@pytest.mark.slow
def test_a_response_has_the_same_routes_across_a_restart(model, ranks):
    """As in a checkpoint: some responses are finished, some are unfinished, and some have not begun."""
    args = parts.make(train_async.Args, model=model, router_replay="R3", rollout_n=4, max_response_length=24, max_num_seqs=6)
    job, pool = set_up(args, train_async.__file__), ScoringPool(args.reward)

    def generator():
        made = make_generator(args, job, ranks, pool)
        made.engine.version = 0
        return made

    whole, stopped, resumed = generator(), generator(), generator()
    expected = whole.generate(range(3))
    for ticket in range(3):
        stopped.start(ticket)
    for _ in range(9):
        stopped.score(stopped.decode())
    so_far = [Group.from_bytes(group.to_bytes()) for group in stopped.unfinished()]
    counts = {len(response.token_ids) for group in so_far for response in group.responses}
    assert 0 in counts and len(counts) > 1
    for group in so_far:
        resumed.start(group.ticket, group)
    groups = []
    while resumed.working:
        groups += resumed.score(resumed.decode(), wait=1.0)
    done = {group.ticket: group for group in groups}
    for group in expected:
        if group.ticket not in done:  # it had been handed over before the stop
            continue
        other = done[group.ticket]
        assert np.array_equal(other.prompt_routes, group.prompt_routes)
        for a, b in zip(other.responses, group.responses, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids) and a.routes.shape == (len(a.token_ids) - 1, 2, 2)
            assert np.array_equal(a.routes, b.routes)
    assert done
    pool.close()


@pytest.mark.slow
def test_r2_replays_the_pass_of_the_old_log_probs(model, ranks):
    """Two epochs at a high rate: without replay the router would choose other experts in the second."""
    trainer = Trainer(model, ranks)
    router, passes = trainer.learner.policy.router, []
    begin = router.begin

    def noting(layout, routes=None, observe=0):
        if passes and router._layout is not None:
            passes[-1] += (router.chosen(),)
        passes.append((torch.is_grad_enabled(), routes))
        begin(layout, routes, observe)

    router.begin = noting
    trainer.learner.optimizer.param_groups[0]["lr"] = 0.1
    trainer.steps(1, router_replay="R2", ppo_epochs=2, entropy_coeff=1.0)
    passes[-1] += (router.chosen(),)
    old, first, second = passes
    assert not old[0] and old[1] is None and first[0] and second[0]
    assert torch.equal(first[1], old[2]) and torch.equal(first[2], old[2]) and torch.equal(second[2], old[2])
    metrics = trainer.learner.router_metrics()
    assert metrics["moe/replay/choices_differ"] > 0
    trainer.pool.close()


def test_what_cannot_be_replayed_is_refused(demo_model, model, ranks):
    args = parts.make(train_sync.Args, model=demo_model, router_replay="R3")
    with pytest.raises(UserError, match="--router-replay R3, but Qwen2ForCausalLM has no router that can be replayed here"):
        set_up(args, train_sync.__file__)
    with pytest.raises(UserError, match=r"--router-replay R2 replays the pass .* Give R3, or add --rollout-is token"):
        check(parts.make(train_async.Args, router_replay="R2"))
    check(parts.make(train_async.Args, router_replay="R2", use_rollout_log_probs=False))
    learner = Learner(model, LearnerArgs(router_replay="R3"), ranks, 10)
    batch = Batch.of([make_group(0, [3, 4])])
    batch.token %= 18
    with pytest.raises(UserError, match="the samples came without their routes"):
        learner.log_probs(learner.policy, MicroBatch.of(batch, [0, 1], ranks.device), replays=True)
