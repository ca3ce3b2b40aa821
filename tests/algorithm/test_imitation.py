"""--sft-files: an update's gradient is that of the samples plus the coefficient times transformers' of the demonstrations."""

import json

import pytest
import torch
from helpers import flat_gradient, make_demonstrations, make_group, padded_loss, relative

import train_async
import train_one_step_off
import train_sync
from rl import flags, parts
from rl.algorithm.imitation import Imitation
from rl.data.demonstrations import Demonstration
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.learning.division import Division
from rl.learning.learner import Learner
from rl.ranges import check
from rl.ranks.timers import Timers
from rl.setup import set_up

SFT = {"sft_files": ("demo",), "sft_coef": 0.3, "sft_batch_size": 3}


@pytest.fixture(scope="module")
def rows() -> list[Demonstration]:
    return make_demonstrations(1, 2, 3, 2, 1, 1, 2)


def gradients(script, path: str, ranks, step: int, rows=(), **more) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Of each update of that step, the weights staying what they are; and the step's metrics."""
    args = parts.make(script.Args, train_batch_size=4, ppo_mini_batch_size=2, rollout_n=3, **more)
    check(args)
    learner, found = Learner(path, args.learner, ranks, 10), []
    if args.imitation.sft_files:
        learner.imitation = Imitation(args, rows)
    learner.steps = step - 1

    def take_step() -> dict[str, float]:
        found.append(flat_gradient(learner.policy).double())
        learner.optimizer.zero_grad()
        return {"actor/grad_norm": 0.0, "actor/lr": 0.0, "actor/skipped_steps": 0}

    learner.step = take_step
    batch = Batch.of([make_group(ticket, (5, 3, 7)) for ticket in range(4)], Division.of(args, learner))
    metrics = script.learn(args, learner, batch, Timers())
    return found, metrics


@pytest.mark.parametrize("tokens", [22, 8192], ids=["one row after the other", "all together"])
@pytest.mark.parametrize("script", [train_sync, train_one_step_off, train_async], ids=lambda script: script.__name__)
def test_their_term_is_transformers_and_has_its_own_denominator(ranks, rows, models, script, tokens):
    path = models["qwen2-untied"]
    more = {"max_tokens_per_micro_batch": tokens, "max_prompt_length": 14, "max_response_length": 8}
    alone, plain = gradients(script, path, ranks, step=3, **more)
    mixed, metrics = gradients(script, path, ranks, 3, rows, **more, **SFT)
    order = Imitation(parts.make(script.Args, **SFT), rows).order
    nll = []
    for update in range(2):  # steps 1 and 2 have taken two times two updates' rows
        first = (2 * 2 + update) * 3
        loss, expected = padded_loss(path, [rows[order(ticket)[1]] for ticket in range(first, first + 3)])
        nll.append(loss)
        found = mixed[update] - alone[update]
        assert relative(found, 0.3 * expected) < 3e-5
    assert metrics.pop("actor/sft_nll") == pytest.approx(sum(nll) / 2, rel=1e-5)
    assert metrics == plain, "nothing that is reported of the samples counts them"


@pytest.mark.slow
def test_what_cannot_be_used_is_named(demo_model, demo_vl_model, tmp_path):
    def of(*words: object) -> None:
        file = tmp_path / "rows.jsonl"
        set_up(flags.read(train_sync.Args, args=[*map(str, ["--test-freq", 0, "--sft-files", file, *words])]), "train_sync.py")

    with pytest.raises(UserError, match=r"rows\.jsonl: no such file \(--sft-files\)"):
        of()
    row = {"prompt": "1+1=", "response": "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"response": "2" * 90}) + "\n")
    with pytest.raises(UserError, match=r"row 0: the conversation has \d+ tokens, more than --max-prompt-length with"):
        of("--model", demo_model)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "response": "2"}\n')
    with pytest.raises(UserError, match=r"the columns are question, response\. Name them so\."):
        of("--model", demo_model)
    with pytest.raises(UserError, match=r"--sft-files takes only text, and --model .* takes images"):
        of("--model", demo_vl_model, "--train-files", "demo-vl", "--val-files", "demo-vl")
    with pytest.raises(UserError, match="--router-replay R3 replays a generator's routes"):
        check(parts.make(train_sync.Args, router_replay="R3", rollout_is="token", **SFT))
