"""The formulas of losses.py as slow loops over Python lists, written from the papers. They share no code with losses.py.

Per token: lists of length n, `seq` says the response. A policy loss takes the log-probs twice, `lp` and `frozen`: the second
stands wherever the paper stops the gradient, so that a finite difference in `lp` alone is the gradient of the loss.
"""

import math
import random
import statistics

import torch

OF_ALL = ("reward", "mask", "seq", "group")  # what every advantage takes


def random_batch(lengths, seed=0, mask_rate=0.75, spread=0.4):
    """A ragged batch as fp64 tensors: what losses.py takes. `.tolist()` of each is what this file takes."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    rand = lambda: torch.randn(n, generator=g, dtype=torch.float64)  # noqa: E731
    lp = -rand().abs() - 0.05
    reward = torch.where(torch.rand(n, generator=g) < 0.5, rand(), 0.0)
    rng = random.Random(seed)
    return {
        "lp": lp,
        "old": torch.clamp(lp + spread * rand(), max=-1e-3),
        "roll": torch.clamp(lp + spread * rand(), max=-1e-3),
        "advantage": rand(),
        "value": rand(),
        "reward": reward,
        "mask": torch.rand(n, generator=g) < mask_rate,
        "seq": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long)),
        "group": torch.tensor([rng.choice([3, 7, -1]) for _ in lengths], dtype=torch.long),
        "parts": torch.randint(0, 3, (len(lengths), 2), generator=g).double(),
        "weights": torch.tensor([1.0, 2.5], dtype=torch.float64),
        "energy": rand().abs(),
        "baseline": torch.arange(len(lengths), dtype=torch.float64) / 3 - 1,
    }


def lists(batch):
    return {name: tensor.tolist() for name, tensor in batch.items()}


def tokens_of(seq):
    """{response: its token indices}."""
    rows = {}
    for t, i in enumerate(seq):
        rows.setdefault(i, []).append(t)
    return rows


def clip(x, low, high):
    return max(low, min(high, x))


def slope(function, x, *rest):
    """Of the function in its first argument, by finite differences."""
    return (function(x + 1e-6, *rest) - function(x - 1e-6, *rest)) / 2e-6


# ------------------------------------------------------------------------------------------------------- advantages


def scores(reward, seq, n):
    return [sum(r for r, j in zip(reward, seq, strict=True) if j == i) for i in range(n)]


def whiten(x, mask):
    kept = [v for v, m in zip(x, mask, strict=True) if m]
    if not kept:
        return [0.0] * len(x)
    mean = sum(kept) / len(kept)
    var = statistics.variance(kept) if len(kept) > 1 else 0.0
    return [(v - mean) / math.sqrt(var + 1e-8) if m else 0.0 for v, m in zip(x, mask, strict=True)]


def by_response(name, s, lengths, group):
    """One advantage a response; s, lengths (trained tokens), group: lists of length B. Without one it is absent."""
    out, differ, trained = [], 0, [j for j in range(len(s)) if lengths[j]]
    std_of_all = statistics.stdev([s[j] for j in trained]) if len(trained) > 1 else 0.0
    for i, mine in enumerate(s):
        if not lengths[i]:
            out.append(0.0)
            continue
        peers = [j for j in trained if group[j] == group[i]]
        values = [s[j] for j in peers]
        differ += len(set(values)) > 1
        n, mean = len(values), sum(values) / len(values)
        std = statistics.stdev(values) if n > 1 else 0.0
        if name == "grpo":
            out.append((mine - mean) / (std + 1e-6) if n > 1 else mine / (1 + 1e-6))
        elif name == "grpo_batch_std":
            out.append((mine - mean) / (std_of_all + 1e-6))
        elif name == "maxrl":
            out.append((mine - mean) / mean if mean > 1e-6 else 0.0)
        elif name in ("dr_grpo", "gpg", "reinforce_pp_baseline"):
            out.append(mine - mean)
        elif name == "rloo":
            out.append(mine - (sum(values) - mine) / (n - 1) if n > 1 else 0.0)
        elif name == "opo":
            total = sum(lengths[j] for j in peers)
            out.append(mine - sum(lengths[j] * s[j] for j in peers) / total)
        elif name == "grpo_passk":
            ranked = sorted(values, reverse=True)
            out.append((ranked[0] - ranked[1]) / (std + 1e-6) if n > 1 and mine == ranked[0] else 0.0)
    if name == "gpg":
        out = [a * len(trained) / max(1, differ) for a in out]
    return out


def steps_of(reward, mask, tokens):
    """[token, reward] of each trained token, the reward with that of the masked tokens behind it."""
    steps = []
    for t in tokens:
        if mask[t]:
            steps.append([t, reward[t]])
        elif steps:
            steps[-1][1] += reward[t]
    return steps


def return_to_go(reward, mask, seq, gamma):
    out = [0.0] * len(seq)
    for tokens in tokens_of(seq).values():
        ahead = 0.0
        for t, r in reversed(steps_of(reward, mask, tokens)):
            out[t] = ahead = r + gamma * ahead
    return out


def lambda_return(reward, mask, seq, value, gamma, lam):
    """The textbook recursion from the last trained token backwards, over trained tokens only."""
    out = [0.0] * len(seq)
    for tokens in tokens_of(seq).values():
        steps = steps_of(reward, mask, tokens)
        next_value = running = 0.0
        for t, r in reversed(steps):
            delta = r + gamma * next_value - value[t]
            running = delta + gamma * lam * running
            out[t], next_value = running + value[t], value[t]
    return out


def gdpo(parts, weights, lengths, group):
    """One advantage a response: GDPO's equations, reward by reward and group by group."""
    trained, total = [i for i in range(len(group)) if lengths[i]], [0.0] * len(group)
    for k, weight in enumerate(weights):
        for i in trained:
            values = [parts[j][k] for j in trained if group[j] == group[i]]
            std = statistics.stdev(values) if len(values) > 1 else 0.0
            total[i] += weight * (parts[i][k] - statistics.mean(values)) / (std + 1e-6)
    std = statistics.stdev(total[i] for i in trained) if len(trained) > 1 else 0.0
    mean = statistics.mean(total[i] for i in trained) if trained else 0.0
    return [(total[i] - mean) / (std + 1e-6) if lengths[i] else 0.0 for i in range(len(group))]


def optimal_token_baseline(reward, mask, seq, group, energy):
    """Equation by equation: every response's return and spent energy at each of its steps, then a mean for each step."""
    returns, spent, tokens = {}, {}, {}
    for i, row in tokens_of(seq).items():
        steps = steps_of(reward, mask, row)
        tokens[i] = [t for t, _ in steps]
        returns[i] = [sum(r for _, r in steps[k:]) for k in range(len(steps))]
        spent[i] = [sum(energy[t] for t in tokens[i][: k + 1]) for k in range(len(steps))]
    out = [0.0] * len(seq)
    for i, of_response in tokens.items():
        for k, t in enumerate(of_response):
            those = [j for j in tokens if group[j] == group[i] and len(tokens[j]) > k]
            total = sum(spent[j][k] for j in those)
            best = sum(spent[j][k] * returns[j][k] for j in those) / (total + 1e-8) if len(those) > 1 else 0.0
            out[t] = returns[i][k] - best
    return out


def advantage(name, batch, gamma=1.0):
    """batch: `lists` of a random_batch."""
    reward, mask, seq, group = (batch[key] for key in OF_ALL)
    n = len(group)
    if name == "optimal_token_baseline":
        return optimal_token_baseline(reward, mask, seq, group, batch["energy"])
    if name == "reinforce_pp":
        return whiten(return_to_go(reward, mask, seq, gamma), mask)
    if name == "remax":
        ahead = return_to_go(reward, mask, seq, 1.0)
        return [(a - batch["baseline"][i]) if m else 0.0 for a, i, m in zip(ahead, seq, mask, strict=True)]
    if name == "gae":
        returns = lambda_return(reward, mask, seq, batch["value"], 1.0, 1.0)
        return whiten([r - v for r, v in zip(returns, batch["value"], strict=True)], mask)
    lengths = [sum(m for m, j in zip(mask, seq, strict=True) if j == i) for i in range(n)]
    if name == "gdpo":
        per_response = gdpo(batch["parts"], batch["weights"], lengths, group)
    else:
        per_response = by_response(name, scores(reward, seq, n), lengths, group)
    out = [per_response[i] if m else 0.0 for i, m in zip(seq, mask, strict=True)]
    return whiten(out, mask) if name == "reinforce_pp_baseline" else out


# ------------------------------------------------------------------------------------------------------ aggregation


def aggregate(loss, mask, seq, mode, num_seqs, budget):
    rows = [[loss[t] for t in tokens if mask[t]] for tokens in tokens_of(seq).values()]
    if mode == "token-mean":
        return sum(map(sum, rows)) / max(1, sum(map(len, rows)))
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / max(1, num_seqs)
    if mode == "seq-mean-token-sum-norm":
        return sum(map(sum, rows)) / max(1, num_seqs) / budget
    filled = [sum(row) / len(row) for row in rows if row]
    return sum(filled) / max(1, len(filled))


# ---------------------------------------------------------------------------------------------------- policy losses


def ppo_token(d, a, low, high, c=None):
    r = math.exp(clip(d, -20, 20))
    loss = max(-a * r, -a * clip(r, 1 - low, 1 + high))
    return min(loss, -a * c) if a < 0 and c is not None else loss


def policy_loss(name, lp, frozen, old, a, mask, seq, low, high, c, chosen=None, roll=None, cap=5.0):
    """Return per-token losses. Entries of masked tokens have no meaning."""
    n = len(lp)
    d = [lp[t] - old[t] if mask[t] else 0.0 for t in range(n)]
    d_frozen = [frozen[t] - old[t] if mask[t] else 0.0 for t in range(n)]
    r_frozen = [math.exp(clip(x, -20, 20)) for x in d_frozen]
    out = [0.0] * n
    for tokens in tokens_of(seq).values():
        trained = [t for t in tokens if mask[t]]
        if not trained:
            continue
        mean_d = sum(d_frozen[t] for t in trained) / len(trained)
        w = math.exp(clip(sum(d_frozen[t] for t in trained), -20, 20))
        if name == "gmpo":
            u = []
            for t in trained:
                sign = (a[t] > 0) - (a[t] < 0)
                u.append(sign * min(sign * d[t], sign * clip(d[t], -low, high)))
            mean_a = sum(a[t] for t in trained) / len(trained)
            sequence = -mean_a * math.exp(sum(u) / len(u))
        for t in trained:
            if name == "ppo_clip":
                out[t] = ppo_token(d[t], a[t], low, high, c)
            elif name in ("gspo", "luspo"):
                s = math.exp(min(lp[t] - frozen[t] + mean_d, 10))
                out[t] = max(-a[t] * s, -a[t] * clip(s, 1 - low, 1 + high))
            elif name == "gmpo":
                out[t] = sequence
            elif name == "cispo":
                out[t] = -clip(r_frozen[t], 1 - low, 1 + high) * a[t] * lp[t]
            elif name == "sapo":
                tau = 1.0 if a[t] > 0 else 1.05
                x = tau * (math.exp(clip(d[t], -20, 20)) - 1)
                out[t] = -a[t] * (4 / tau) / (1 + math.exp(-x))
            elif name == "reinforce":
                out[t] = -a[t] * lp[t]
            elif name == "dro":
                out[t] = -a[t] * lp[t] + 0.05 / 2 * (lp[t] - old[t]) ** 2
            elif name == "vespo":
                k, lam = (2, 3) if a[t] >= 0 else (3, 2)
                out[t] = -a[t] * w**k * math.exp(lam * (1 - w)) * lp[t]
            elif name == "clip_cov":
                out[t] = 0.0 if chosen[t] else ppo_token(d[t], a[t], low, high)
            elif name == "kl_cov":
                out[t] = -a[t] * math.exp(d[t]) + (abs(d[t]) if chosen[t] else 0.0)
            elif name == "dppo_tv":
                moved = math.exp(frozen[t]) - math.exp(old[t])
                inside = moved <= high if a[t] > 0 else moved >= -low
                out[t] = -a[t] * min(r_frozen[t], c) * lp[t] if inside else 0.0
            elif name == "dppo_kl":
                far = binary_kl(math.exp(old[t]), math.exp(frozen[t])) > (high if a[t] > 0 else low)
                away = frozen[t] > old[t] if a[t] > 0 else frozen[t] < old[t]
                out[t] = 0.0 if far and away else -a[t] * min(r_frozen[t], c) * lp[t]
            elif name == "decoupled_ppo":
                out[t] = ppo_token(d[t], a[t], low, high, c) * min(math.exp(old[t] - roll[t]), cap)
    return out


def binary_kl(p, q):
    """KL(Bernoulli(p) || Bernoulli(q))."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def off_policy(lp, roll, a, mask, seq, threshold):
    """The tokens that DeepSeek-V3.2's mask sets to 0."""
    out = [False] * len(lp)
    for tokens in tokens_of(seq).values():
        trained = [t for t in tokens if mask[t]]
        drift = sum(roll[t] - lp[t] for t in trained) / max(1, len(trained))
        for t in trained:
            out[t] = a[t] < 0 and drift > threshold
    return out


def covariances(lp, a, mask):
    kept = [t for t in range(len(lp)) if mask[t]]
    mean_a, mean_lp = (sum(x[t] for t in kept) / max(1, len(kept)) for x in (a, lp))
    return {t: (a[t] - mean_a) * (lp[t] - mean_lp) for t in kept}


def value_loss(v, old, target, eps):
    return 0.5 * max((v - target) ** 2, (clip(v, old - eps, old + eps) - target) ** 2)


def kl(kind, lp, ref, old=None):
    x = lp - ref
    if kind in ("k1", "kl"):
        return x
    if kind == "k3r":  # with the ratio, which carries a gradient
        return math.exp(lp - old) * kl("k3", lp, ref)
    if kind == "abs":
        return abs(x)
    if kind in ("k2", "mse"):
        return x * x / 2
    k = clip(-x, -20, 20)
    return clip(math.exp(k) - k - 1, -10, 10)


# ----------------------------------------------------------------------------------------------- rollout correction


def rollout_ratios(lp, roll, mask, seq, level):
    """The importance ratio per token before any cap; None on masked tokens."""
    lr = {t: clip(lp[t] - roll[t], -20, 20) for t in range(len(lp)) if mask[t]}
    out = [None] * len(lp)
    for tokens in tokens_of(seq).values():
        mine = [lr[t] for t in tokens if mask[t]]
        for t in tokens:
            if mask[t]:
                x = {"token": lr[t], "sequence": sum(mine), "sequence_geometric": sum(mine) / len(mine)}[level]
                out[t] = math.exp(clip(x, -20, 20))
    return out


def rollout_weights(lp, roll, mask, seq, level, low, high, normalize):
    ratios = rollout_ratios(lp, roll, mask, seq, level)
    out = []
    for w in ratios:
        if w is None:
            out.append(0.0)
        elif low is None:
            out.append(min(w, high))
        else:
            out.append(w if low <= w <= high else 0.0)
    if normalize:
        if level == "token":
            units = [w for w, m in zip(out, mask, strict=True) if m]
        else:
            rows = [[out[t] for t in tokens if mask[t]] for tokens in tokens_of(seq).values()]
            units = [row[0] for row in rows if row]
        mean = sum(units) / max(1, len(units))
        out = [w / mean for w in out] if mean > 0 else out
    return out


def rollout_metrics(lp, roll, mask, seq, level, low, high, kept):
    """Return verl 0.9.1's metrics of these names (rollout_corr_helper.py), written from its documentation, not its code."""
    ratios = rollout_ratios(lp, roll, mask, seq, level)
    weights = rollout_weights(lp, roll, mask, seq, level, low, high, False)
    applied = [w for w, m in zip(weights, mask, strict=True) if m]
    if not applied:
        return {}
    rows = [[t for t in tokens if mask[t]] for tokens in tokens_of(seq).values()]
    rows = [row for row in rows if row]
    units = [ratios[t] for row in rows for t in row] if level == "token" else [ratios[row[0]] for row in rows]
    ends = applied if level == "token" else units
    mean = sum(applied) / len(applied)
    square = sum(w * w for w in applied) / len(applied)
    own, theirs = ([-sum(of[t] for t in row) / len(row) for row in rows] for of in (lp, roll))
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(max(0.0, sum((w - mean) ** 2 for w in applied) / len(applied))),
        "rollout_is_max": max(ends),
        "rollout_is_min": min(ends),
        "rollout_is_eff_sample_size": 1 / (square / mean**2) if mean else 0.0,
        "rollout_is_ratio_fraction_high": sum(w > high for w in units) / len(units),
        "rollout_is_ratio_fraction_low": sum(w < (low or 1 / high) for w in units) / len(units),
        "rollout_rs_masked_fraction": sum(not kept[t] for row in rows for t in row) / len(applied),
        "rollout_rs_seq_masked_fraction": sum(not all(kept[t] for t in row) for row in rows) / len(rows),
        "kl": sum(roll[t] - lp[t] for row in rows for t in row) / len(applied),
        "k3_kl": sum(math.exp(lp[t] - roll[t]) - (lp[t] - roll[t]) - 1 for row in rows for t in row) / len(applied),
        "chi2_token": sum(math.exp(2 * (lp[t] - roll[t])) for row in rows for t in row) / len(applied) - 1,
        "chi2_seq": sum(math.exp(2 * sum(lp[t] - roll[t] for t in row)) for row in rows) / len(rows) - 1,
        "training_log_ppl": sum(own) / len(rows),
        "rollout_log_ppl": sum(theirs) / len(rows),
        "log_ppl_diff": sum(a - b for a, b in zip(own, theirs, strict=True)) / len(rows),
        "log_ppl_abs_diff": sum(abs(a - b) for a, b in zip(own, theirs, strict=True)) / len(rows),
        "training_ppl": sum(map(math.exp, own)) / len(rows),
        "rollout_ppl": sum(map(math.exp, theirs)) / len(rows),
        "ppl_ratio": sum(math.exp(a - b) for a, b in zip(own, theirs, strict=True)) / len(rows),
    }


def rejected(lp, roll, mask, seq, level, divergence, low, high):
    """Return a list of bool: whether one criterion rejects each token."""
    measure = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - x - 1}.get(divergence)

    def bad(x):
        return not low <= math.exp(clip(x, -20, 20)) <= high if divergence == "k1" else x > high

    def value(t):
        if divergence != "binary_kl":
            return measure(clip(lp[t] - roll[t], -20, 20))
        p, q = math.exp(lp[t]), math.exp(roll[t])
        return max(binary_kl(p, q), binary_kl(q, p))

    out = [False] * len(lp)
    if level == "batch":  # one by one, the worst first, but never the last
        left = sorted((t for t in range(len(lp)) if mask[t]), key=value)
        while len(left) > 1 and sum(map(value, left)) / len(left) > high:
            out[left.pop()] = True
        return out
    for tokens in tokens_of(seq).values():
        trained = [t for t in tokens if mask[t]]
        values = [value(t) for t in trained]
        for t, v in zip(trained, values, strict=True):
            if level == "token":
                out[t] = bad(v)
            elif level == "seq_max":
                out[t] = any(bad(x) for x in values)
            else:
                out[t] = bad(sum(values) if level == "seq_sum" else sum(values) / len(values))
    return out
