"""Whole runs with a critic, on the demo: they learn, resume in the warm-up, are in async what they are in sync, and replay."""

import json

import pytest
from helpers import train

pytestmark = [pytest.mark.runs, pytest.mark.slow]


@pytest.mark.parametrize(("script", "ranks"), [("train_sync.py", 1), ("train_one_step_off.py", 2), ("train_async.py", 2)])
def test_the_demo_learns_with_a_critic_in_every_script(demo_model, tmp_path, script, ranks):
    """With the flags of docs/teachers.md at a higher rate: how well the demo does at the start depends on the processor that
    taught it. Three standard errors of two shares of 500 are .1; six such models gain .20 to .46, and the critic's loss while
    the policy waits falls to .66 to .78."""
    flags = ("--adv-estimator", "gae", "--critic-warmup", 10, "--critic-ppo-epochs", 4, "--critic-lr", 3e-4, "--lr", 3e-4)
    rows, run, _ = train(script, *flags, "--total-training-steps", 60, "--test-freq", 60, out=tmp_path, ranks=ranks)
    first, last = map(json.loads, (run / "validations.jsonl").read_text().splitlines())
    assert last["step"] == 60 and last["val-core/demo/acc/mean@1"] > first["val-core/demo/acc/mean@1"] + 0.1
    loss = [rows[step]["critic/vf_loss"] for step in range(1, 16)]
    assert sum(loss[5:]) / 10 < 0.9 * sum(loss[:5]) / 5
