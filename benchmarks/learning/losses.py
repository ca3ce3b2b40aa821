"""Each policy loss with its backward compared with the plainest version of its own formula, interleaved in one run.

    python benchmarks/learning/losses.py          # writes benchmarks/results/losses.{json,md}

The plain version is the formula and nothing else: no mask inside, no clamp against overflow, no statistics. Both are aggregated
by the same function. 1M tokens in ragged responses, fp32, on the CPU unless --device says otherwise. The ratio is the median of
the rounds' ratios. What losses.py does besides costs about seven passes over the tokens (the mask on the log-probs, forward
and backward, and the statistics): much compared with a formula of two multiplications, little with one of fifteen.
"""

import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tyro
from common import RESULTS, synchronize, table, words, write

import losses


@dataclass
class Args:
    tokens: int = 1_000_000
    """Response tokens of the batch."""
    mean_length: int = 500
    """Mean length of a response."""
    repeats: int = 15
    """Measurements of each; the first round is not counted."""
    threads: int = 1
    """Threads of torch."""
    device: str = "cpu"
    """Where the tensors lie."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


# ------------------------------------------------------------------------------- the plainest version of each formula


def clipped(ratio, a, low, high):
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))


def sequence_means(x, b):
    return torch.zeros(b["responses"], dtype=x.dtype, device=x.device).index_add(0, b["seq"], x) / b["lengths"]


def ppo_clip(lp, old, a, b):
    loss = clipped((lp - old).exp(), a, 0.2, 0.2)
    return torch.where(a < 0, torch.minimum(loss, -a * 3), loss)


def gspo(lp, old, a, b):
    level = sequence_means((lp - old).detach(), b)[b["seq"]]
    return clipped((lp - lp.detach() + level).exp(), a, 3e-4, 4e-4)


def gmpo(lp, old, a, b):
    d, sign = lp - old, a.sign()
    u = sign * torch.minimum(sign * d, sign * d.clamp(-0.4, 0.4))
    return (-sequence_means(a, b) * sequence_means(u, b).exp())[b["seq"]]


def cispo(lp, old, a, b):
    return -(lp - old).exp().clamp(0, 1.2).detach() * a * lp


def sapo(lp, old, a, b):
    tau = torch.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau * torch.sigmoid(tau * ((lp - old).exp() - 1))


def reinforce(lp, old, a, b):
    return -a * lp


def covariance(lp, a):
    return (a - a.mean()) * (lp - lp.mean())


def clip_cov(lp, old, a, b):
    ratio = (lp - old).exp()
    plain, loss = -a * ratio, clipped(ratio, a, 0.2, 0.2)
    cov = covariance(lp.detach(), a)
    places = ((cov > 1) & (cov < 5) & (loss <= plain)).nonzero()[:, 0]
    keep = torch.ones_like(a)
    keep[places[torch.randperm(len(places))[: int(2e-4 * len(a))]]] = 0
    return loss * keep


def kl_cov(lp, old, a, b):
    d = lp - old
    loss = -a * d.exp()
    top = covariance(lp.detach(), a).topk(int(2e-4 * len(a))).indices
    return loss.index_add(0, top, d[top].abs())


def dppo_tv(lp, old, a, b):
    moved = lp.detach().exp() - old.exp()
    inside = torch.where(a > 0, moved <= 0.2, moved >= -0.2)
    return -a * (lp - old).detach().exp().clamp(max=20) * lp * inside


def decoupled_ppo(lp, old, a, b):
    return ppo_clip(lp, old, a, b) * (old - b["roll"]).exp().clamp(max=5)


PLAIN = [ppo_clip, gspo, gmpo, cispo, sapo, reinforce, clip_cov, kl_cov, dppo_tv, decoupled_ppo]


def make_batch(args: Args) -> dict:
    torch.manual_seed(0)
    responses = max(1, args.tokens // args.mean_length)
    lengths = torch.bincount(torch.randint(responses, (args.tokens,)), minlength=responses).clamp(min=1)
    seq = torch.arange(responses).repeat_interleave(lengths)
    lp = -torch.rand(len(seq)) * 4
    batch = {
        "lp": lp,
        "old": lp + 0.1 * torch.randn_like(lp),
        "roll": lp + 0.1 * torch.randn_like(lp),
        "advantage": torch.randn_like(lp),
        "mask": torch.ones(len(seq), dtype=torch.bool),
        "seq": seq,
        "lengths": lengths,
    }
    return {k: v.to(args.device) for k, v in batch.items()} | {"responses": responses}


def timed(run) -> float:
    """Seconds of one forward and backward."""
    synchronize()
    start = time.perf_counter()
    run().backward()
    synchronize()
    return time.perf_counter() - start


def measure(plain, b: dict, args: Args) -> dict:
    name = plain.__name__
    mode = losses.default_aggregation("grpo", name)
    lp = b["lp"].requires_grad_()
    old, a, mask, seq = b["old"], b["advantage"], b["mask"], b["seq"]
    denominator = losses.denominator(mask, seq, mode, b["responses"])
    extra = {"rollout_log_prob": b["roll"]} if name == "decoupled_ppo" else {}

    def ours():
        return losses.aggregate(losses.POLICY_LOSSES[name](lp, old, a, mask, seq, **extra)[0], mask, seq, mode, denominator)

    def theirs():
        return losses.aggregate(plain(lp, old, a, b), mask, seq, mode, denominator)

    torch.manual_seed(1)
    value = ours().item()
    torch.manual_seed(1)
    expected = theirs().item()
    assert abs(value - expected) <= 1e-4 * max(1, abs(expected)), (name, value, expected)
    times = [(timed(ours), timed(theirs)) for _ in range(args.repeats + 1)][1:]
    mine, other = zip(*times, strict=True)
    ratios = statistics.quantiles([m / o for m, o in times], n=4)
    return {
        "loss": name,
        "ms": 1e3 * statistics.median(mine),
        "plain_ms": 1e3 * statistics.median(other),
        "ratio": ratios[1],
        "ratio_quartiles": [ratios[0], ratios[2]],
    }


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    batch = make_batch(args)
    rows = [measure(plain, batch, args) for plain in PLAIN]
    head, lines = ["loss", "losses.py, ms", "plain formula, ms", "ratio", "quartiles of the ratio"], []
    for r in rows:
        low, high = r["ratio_quartiles"]
        lines.append([r["loss"], f"{r['ms']:.1f}", f"{r['plain_ms']:.1f}", f"{r['ratio']:.2f}", f"{low:.2f} - {high:.2f}"])
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    setting = {
        "tokens": len(batch["lp"]),
        "responses": batch["responses"],
        "repeats": args.repeats,
        "threads": args.threads,
    }
    setting |= {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    write("losses", {"setting": setting, "rows": rows}, f"{table(head, lines)}\n\n{words(setting)}", args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
