"""A second oracle where TRL is installed: losses, gradients, masks and steering of entropy equal those of its GRPOTrainer."""

from collections import defaultdict
from types import SimpleNamespace

import losses_reference as slow
import pytest
import torch

import losses

GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is not installed").GRPOTrainer
LENGTHS, BUDGET = [3, 1, 5, 2, 4], 16


class Theirs:
    """What GRPOTrainer._compute_loss looks at, with log-probs in the place of a model."""

    _compute_loss, get_high_entropy_mask = GRPOTrainer._compute_loss, GRPOTrainer.get_high_entropy_mask
    get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)
    get_gamma_weights = staticmethod(GRPOTrainer.get_gamma_weights)

    def __init__(self, **settings):
        of_args = dict(delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
        of_args |= dict(vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, steps_per_generation=1)
        of_args |= dict(entropy_target=0.2, entropy_coef_delta=0.005, entropy_coef_min=0.0, entropy_coef_max=1.0)
        of_self = dict(loss_type="dapo", importance_sampling_level="token", beta=0.0, epsilon_low=0.2, epsilon_high=0.2)
        of_self |= dict(top_entropy_quantile=1.0, off_policy_mask_threshold=None, entropy_coef=0.0, use_adaptive_entropy=False)
        of_self |= dict(use_vllm=False, aux_loss_enabled=False, max_completion_length=BUDGET)
        of_self |= dict(current_gradient_accumulation_steps=1, _last_world_entropy=float("inf"), _entropy_window_stats=None)
        self.args = SimpleNamespace(**{name: settings.pop(name, value) for name, value in of_args.items()})
        vars(self).update(of_self | settings)
        self._entropy_bonus_enabled = self.entropy_coef != 0 or self.use_adaptive_entropy
        self.model, self._metrics = SimpleNamespace(training=True), defaultdict(lambda: defaultdict(list))
        alone = {name: lambda x, **_: x for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes")}
        self.accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, **alone)

    def loss(self, lp, old, advantage, mask, **more):
        """Each [B, T]."""
        ids = torch.zeros(lp.shape, dtype=torch.long)
        self._get_per_token_logps_and_entropies = lambda *_, **__: (lp, more["entropy"], None)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": mask.to(lp.dtype),
        }
        inputs |= {"advantages": advantage, "old_per_token_logps": old, "num_items_in_batch": mask.sum()}
        inputs |= {"ref_per_token_logps": more["ref"], "sampling_per_token_logps": more["roll"]}
        return self._compute_loss(None, inputs)


@pytest.fixture(params=range(3))
def b(request):
    """A batch whose responses have a trained token each; the advantage is one number a response."""
    b = slow.random_batch(LENGTHS, request.param)
    b["mask"][torch.tensor(LENGTHS).cumsum(0) - 1] = True
    b["advantage"] = torch.tensor([1.0, -0.5, 0.7, -1.2, 0.3], dtype=torch.float64)[b["seq"]]
    b["ref"] = b["lp"] + 0.3 * b["value"]
    return b


def compare(b, theirs: Theirs, ours) -> None:
    """ours: f(log_prob [N]) -> the loss, a scalar. Values and gradients have to be equal."""
    lp = b["lp"].clone().requires_grad_()
    expected = ours(lp)
    (gradient,) = torch.autograd.grad(expected, lp)
    other = b["lp"].clone().requires_grad_()
    padded = {name: losses.unpack(b[name], b["seq"], len(LENGTHS)) for name in ("old", "advantage", "mask", "ref", "roll")}
    padded["mask"] = padded["mask"].bool()
    entropy = losses.unpack(b["energy"], b["seq"], len(LENGTHS))
    total = theirs.loss(losses.unpack(other, b["seq"], len(LENGTHS)), **padded, entropy=entropy)
    assert total.item() == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(torch.autograd.grad(total, other)[0], gradient, rtol=1e-9, atol=1e-12)


def total(b, loss, mode, **knobs):
    """The aggregated loss, as a function of the log-probs."""

    def of(lp):
        token_loss, _ = loss(lp, b["old"], b["advantage"], b["mask"], b["seq"], **knobs)
        divisor = losses.denominator(b["mask"], b["seq"], mode, len(LENGTHS), BUDGET)
        return losses.aggregate(token_loss, b["mask"], b["seq"], mode, divisor)

    return of


UNBOUNDED = {"clip_c": 1e9}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
CASES = {
    "grpo": ("ppo_clip", "seq-mean-token-mean", {"loss_type": "grpo"}, UNBOUNDED),
    "dapo, clip-higher": ("ppo_clip", "token-mean", {"epsilon_high": 0.28}, UNBOUNDED | {"clip_high": 0.28}),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm", {"loss_type": "dr_grpo"}, UNBOUNDED),
    "gspo": ("gspo", "seq-mean-token-mean", {"loss_type": "grpo"} | SEQUENCE, {}),
    "luspo": ("luspo", "seq-mean-token-sum", {"loss_type": "luspo"} | SEQUENCE, {"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": ("cispo", "token-mean", {"loss_type": "cispo", "epsilon_high": 1.2}, {}),
    # 1.25 has no rounding error in fp32, which theirs takes the temperatures in
    "sapo": ("sapo", "seq-mean-token-mean", {"loss_type": "sapo", "sapo_temperature_neg": 1.25}, {"tau_neg": 1.25}),
    "vespo": ("vespo", "token-mean", {"loss_type": "vespo"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_equal(b, case):
    name, mode, settings, knobs = CASES[case]
    compare(b, Theirs(**settings), total(b, losses.POLICY_LOSSES[name], mode, **knobs))


@pytest.mark.parametrize("weighed", [False, True])
def test_the_kl_equals(b, weighed):
    kind = "k3r" if weighed else "k3"
    plain = total(b, losses.ppo_clip, "token-mean", **UNBOUNDED)

    def with_kl(lp):
        kl = losses.kl_penalty(lp, b["ref"], b["mask"], kind, b["old"])
        return plain(lp) + 0.1 * losses.aggregate(kl, b["mask"], b["seq"], "token-mean", float(b["mask"].sum()))

    compare(b, Theirs(beta=0.1, use_bias_correction_kl=weighed), with_kl)


def test_the_off_policy_sequence_mask_equals(b):
    def masked(lp, old, advantage, mask, seq, **clips):
        token_loss, stats = losses.ppo_clip(lp, old, advantage, mask, seq, **clips)
        return torch.where(
            losses.off_policy_tokens(lp, b["roll"], advantage, mask, seq, threshold=0.02), 0.0, token_loss
        ), stats

    compare(b, Theirs(off_policy_mask_threshold=0.02), total(b, masked, "token-mean", **UNBOUNDED))


@pytest.mark.parametrize("quantile", [0.2, 0.5])
def test_the_tokens_of_large_entropy_equal(b, quantile):
    b["energy"] = b["energy"].float().double()  # theirs are compared in fp32
    kept = losses.high_entropy_tokens(b["energy"], b["mask"], quantile=quantile)

    def restricted(*tokens, **clips):
        token_loss, stats = losses.ppo_clip(*tokens, **clips)
        return torch.where(kept, token_loss, 0.0), stats

    compare(b, Theirs(top_entropy_quantile=quantile), total(b, restricted, "token-mean", **UNBOUNDED))


def test_the_entropy_is_steered_in_the_same_way(b):
    """By the entropies of a run that falls below the target and rises above it again."""
    theirs, coef, applied = Theirs(use_adaptive_entropy=True), 0.0, 0.0
    plain, scale = total(b, losses.ppo_clip, "token-mean", **UNBOUNDED), b["energy"].clone()
    mean = losses.masked_mean(scale, b["mask"])
    for entropy in (0.5, 0.15, 0.1, 0.05, 0.3, 0.25, 0.1, 0.21):
        b["energy"] = scale * entropy / mean
        compare(b, theirs, lambda lp, entropy=entropy, applied=applied: plain(lp) - applied * entropy)
        found = float(losses.masked_mean(b["energy"], b["mask"]))
        coef = losses.adaptive_entropy_coef(coef, found, 0.2, 0.005, 1.0)
        applied = coef if found <= 0.2 else 0.0
        assert theirs.entropy_coef == pytest.approx(coef, abs=1e-12)
