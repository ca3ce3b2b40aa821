"""Advantages, policy losses, KL estimators, aggregations and rollout correction: pure functions of tensors (torch only).

Layout. Tensors per token are packed, [N]: the response tokens of the batch end to end. `mask` [N] is True on trained tokens
(bool), `seq` [N] is the response that a token belongs to (long, ascending, 0..B-1), and `group` [B] has an id per response
(long, any ids: responses to one prompt share an id and need not be adjacent). Packed tensors have no padding that could leak
into a mean, and a micro-batch is an index into the same tensors, which need not contain every response. A response is never
split between micro-batches. `pack` and `unpack` convert from and to padded [B, T].

Denominators are arguments, computed once over the GLOBAL mini-batch (all ranks, all micro-batches), so that the sum of the
micro-batches' losses does not depend on how the batch was divided. Advantages and rollout correction take the global batch.

Policy losses return the loss per token and detached statistics per token; a statistic's masked mean over the global batch is
the metric. A decorator on each advantage and each loss declares what the scripts must know about it, and registers it under its
names in ADVANTAGES or POLICY_LOSSES, from which the scripts' flags choose.

One step on a prompt with two responses, of two tokens and one token:

    >>> import torch
    >>> mask, seq, group = torch.tensor([True, True, True]), torch.tensor([0, 0, 1]), torch.tensor([7, 7])
    >>> reward = torch.tensor([0.0, 1.0, 0.0])  # at a response's last token, or wherever it is earned
    >>> advantage = dr_grpo(reward, mask, seq, group)
    >>> advantage.tolist()
    [0.5, 0.5, -0.5]
    >>> old_log_prob = torch.tensor([-1.0, -2.0, -0.5])
    >>> log_prob = old_log_prob.clone().requires_grad_()
    >>> loss, stats = ppo_clip(log_prob, old_log_prob, advantage, mask, seq)
    >>> divisor = denominator(mask, seq, "token-mean", num_seqs=2)
    >>> aggregate(loss, mask, seq, "token-mean", divisor).backward()
    >>> log_prob.grad.tolist()
    [-0.1666666716337204, -0.1666666716337204, 0.1666666716337204]

The file's order: layout, sums and means; aggregation; how a formula is declared; advantages; policy losses; tokens that a
policy loss leaves out; the critic; KL to the reference; the teacher; coefficients; rollout correction. A docstring begins with
the formula and names its paper, with the equation or section if it could be looked up (docs/generated/papers.md lists them).

Left out: whatever needs a model or a process group. `d`, `r`, `A`, `s` below: log_prob - old_log_prob, exp(d), advantage, a
response's total reward. sg(x) has the value of x and no gradient.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Loss = tuple[Tensor, dict[str, Tensor]]  # loss [N], {statistic: bool or float [N]}


# ----------------------------------------------------------------------------------------------- layout, sums and means


def pack(valid: Tensor, *padded: Tensor) -> tuple[Tensor, ...]:
    """Pack tensors [B, T]: return seq [N], and each tensor as [N]. valid [B, T]: bool, True on response tokens, trained or not,
    wherever the padding is. Why packed: see the top of the file."""
    if valid.dtype != torch.bool or valid.dim() != 2 or any(x.shape[:2] != valid.shape for x in padded):
        found = ", ".join(f"{tuple(x.shape)}" for x in (valid, *padded))
        raise ValueError(f"pack: found {found}, valid of {valid.dtype}. All have to be [B, T], valid of torch.bool.")
    return (valid.nonzero()[:, 0], *(x[valid] for x in padded))


def unpack(x: Tensor, seq: Tensor, num_seqs: int, length: int | None = None, fill: float = 0.0) -> Tensor:
    """Unpack x, seq [N] to [num_seqs, T], padded on the right with `fill`; T is `length`, by default the longest response's."""
    _check_tokens("unpack", seq=seq)
    sizes = torch.bincount(seq, minlength=num_seqs)  # [B]
    position = torch.arange(len(seq), device=seq.device) - (sizes.cumsum(0) - sizes)[seq]  # [N]
    length = length if length is not None else (int(sizes.max()) if num_seqs else 0)
    out = torch.full((num_seqs, length), fill, dtype=x.dtype, device=x.device)
    out[seq, position] = x
    return out


def sequence_sum(x: Tensor, seq: Tensor, num_seqs: int | None = None) -> Tensor:
    """Return the sum of x [N] over each response's tokens, [num_seqs]; 0 for a response without tokens."""
    if num_seqs is None:
        num_seqs = int(seq[-1]) + 1 if len(seq) else 0
    return torch.zeros(num_seqs, dtype=x.dtype, device=x.device).index_add(0, seq, x)


def sequence_means(mask: Tensor, seq: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    """Return the mean of each x [N] over each response's trained tokens, [B] each; 0 for a response without one."""
    count = sequence_sum(mask.to(xs[0].dtype), seq).clamp(min=1)
    return tuple(sequence_sum(torch.where(mask, x, 0.0), seq) / count for x in xs)


def trained_sequences(mask: Tensor, seq: Tensor) -> Tensor:
    """Return the indices of the responses with a trained token, ascending."""
    return torch.unique_consecutive(seq if mask.all() else seq[mask])


def to_tokens(x: Tensor, seq: Tensor) -> Tensor:
    """Expand x [B] to [N]: each token gets its response's value. Several times as fast as x[seq] on a CPU."""
    return x.index_select(0, seq)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x [N] over the trained tokens, a scalar; 0 if there is none."""
    return torch.where(mask, x, 0.0).sum() / mask.count_nonzero().clamp(min=1)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8) over the trained tokens of the (global) batch, var with Bessel's correction; 0 outside the
    mask. A single trained token gives 0, and equal ones exactly 0: the mean is taken of distances to the smallest, in
    float64."""
    _check_tokens("whiten", x=x, mask=mask)
    above = x.double() - torch.where(mask, x.double(), torch.inf).min() if mask.any() else x.double()
    centered = torch.where(mask, above - masked_mean(above, mask), 0.0)
    variance = (centered**2).sum() / (mask.count_nonzero() - 1).clamp(min=1)
    return (centered * torch.rsqrt(variance + 1e-8)).to(x.dtype)


def return_to_go(reward: Tensor, mask: Tensor, seq: Tensor, gamma: float = 1.0) -> Tensor:
    """R_t = sum over k >= t of gamma^(k - t) r_k within the response, [N] -> [N], 0 outside the mask.

    Steps are the trained tokens: masked tokens are skipped, and a reward on one goes to the trained token before it.
    """
    _check_tokens("return_to_go", reward=reward, mask=mask, seq=seq)
    if mask.all():
        return _discounted(reward, seq, gamma)
    index, r = _steps(reward, mask, seq)
    return torch.zeros_like(reward).index_copy(0, index, _discounted(r, seq[index], gamma))


def _steps(reward: Tensor, mask: Tensor, seq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices [M] of the trained tokens, and the reward [M] of each plus that of the masked tokens after it."""
    index = mask.nonzero()[:, 0]
    before = mask.long().cumsum(0) - 1  # [N] the last trained token at or before each, as a position in index
    credited = before >= 0
    credited[credited.clone()] = seq[index[before[credited]]] == seq[credited]
    r = torch.zeros(len(index), dtype=reward.dtype, device=reward.device)
    return index, r.index_add(0, before[credited], reward[credited])


def _discounted(reward: Tensor, seq: Tensor, gamma: float) -> Tensor:
    """Compute return_to_go if every token is a step, in log2(longest response) passes: the sum over a window of 2w tokens is
    the sum over w plus gamma^w times the sum over the next w."""
    longest = int(torch.bincount(seq).max()) if len(seq) else 0
    total = reward
    width = 1
    while width < longest:
        same = seq[:-width] == seq[width:]
        total = torch.cat([total[:-width] + gamma**width * total[width:] * same, total[-width:]])
        width *= 2
    return total


# ---------------------------------------------------------------------------------------------------------------- aggregation


AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def denominator(mask: Tensor, seq: Tensor, mode: str, num_seqs: int, budget: int | None = None) -> float:
    """Return the divisor of `aggregate`. mask, seq [N] and num_seqs describe the GLOBAL mini-batch. Its unit by mode:

    token-mean               trained tokens
    token-sum                1 (so the step grows with the batch)
    seq-mean-token-sum       responses
    seq-mean-token-sum-norm  responses times `budget` tokens (the response budget; Dr.GRPO, arXiv 2503.20783, section 3.2)
    seq-mean-token-mean      responses with at least one trained token
    At least 1, so that an empty batch gives a loss of 0.
    """
    _check_word("aggregation", mode, AGGREGATIONS)
    _check_tokens("denominator", mask=mask, seq=seq)
    if mode == "token-mean":
        return float(max(1, int(mask.count_nonzero())))
    if mode == "token-sum":
        return 1.0
    if mode == "seq-mean-token-mean":
        return float(max(1, len(trained_sequences(mask, seq))))
    if mode == "seq-mean-token-sum":
        return float(max(1, num_seqs))
    if not budget or budget < 0:
        raise ValueError(f"seq-mean-token-sum-norm divides by the response budget, in tokens: budget is {budget}.")
    return float(max(1, num_seqs) * budget)


def aggregate(loss: Tensor, mask: Tensor, seq: Tensor, mode: str, divisor: float) -> Tensor:
    """Return a micro-batch's share (scalar) of the global loss; loss, mask, seq [N]; divisor: what `denominator` returned.

    The sum over trained tokens, each weighted 1, or 1 / (trained tokens of its response) in seq-mean-token-mean.
    """
    _check_word("aggregation", mode, AGGREGATIONS)
    _check_tokens("aggregate", loss=loss, mask=mask, seq=seq)
    if isinstance(divisor, int | float) and not divisor > 0:
        raise ValueError(f"aggregate: divisor is {divisor}. It has to be positive: losses.denominator computes it.")
    loss = torch.where(mask, loss, 0.0)
    if mode == "seq-mean-token-mean":
        loss = loss / to_tokens(sequence_sum(mask.to(loss.dtype), seq).clamp(min=1), seq)
    return loss.sum() / divisor


# -------------------------------------------------------------------------------------------------- how a formula is declared


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator, called like its function, and what a script must know about it."""

    function: Callable[..., Tensor]
    group_of_one: Literal["zero", "score"] | None  # its value for a group of one: 0, or the score; None: it ignores groups
    aggregation: str | None  # its paper's, if not token-mean
    by_token: bool  # tokens of one response can have different advantages
    looks_at: Literal["response", "scores", "batch"]  # the data it needs: one response, all scores, or every token
    inputs: tuple[str, ...]  # the batch's tensors that it takes in addition to reward, mask, seq and group
    knobs: dict[str, float]  # its numeric parameters, with their defaults

    def __call__(self, *args, **keywords) -> Tensor:
        return self.function(*args, **keywords)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, called like its function, and what a script must know about it."""

    function: Callable[..., Loss]
    aggregation: str | None  # its paper's, if not token-mean
    by_response: bool  # one ratio for a whole response, so no other aggregation makes sense
    one_advantage: bool  # one advantage for a whole response, the mean of its tokens'
    has_ratio: bool  # False: only correct for on-policy tokens; others must be weighted by `importance_weight`
    trains_all: bool  # it has a gradient even if the advantage is 0
    chooses: Callable[..., Tensor] | None  # computes `chosen` on the mini-batch: f(old_log_prob, advantage, mask)
    inputs: tuple[str, ...]  # the batch's tensors that it takes in addition to the usual arguments
    knobs: dict[str, float]  # its numeric parameters, with their defaults
    choice_inputs: tuple[str, ...]  # inputs and knobs of `chooses`
    choice_knobs: dict[str, float]

    def __call__(self, *args, **keywords) -> Loss:
        return self.function(*args, **keywords)


ADVANTAGES: dict[str, Estimator] = {}  # by function name and, if it differs, by verl's name
POLICY_LOSSES: dict[str, PolicyLoss] = {}
# Arguments of advantages that are not per token; all other tensors of advantages and losses are, [N]
PER_RESPONSE = {"group": "[B]", "baseline": "[B]", "parts": "[B, K]", "weights": "[K]"}


def advantage_estimator(
    *verl_names: str,
    group_of_one: Literal["zero", "score"] | None = None,
    aggregation: str | None = None,
    by_token: bool = False,
    looks_at: Literal["response", "scores", "batch"] = "batch",
) -> Callable:
    """Register a function in ADVANTAGES under its name and verl's. The keywords are those of `Estimator`."""

    _check_parentheses("advantage_estimator", verl_names)

    def declare(function: Callable) -> Callable:
        _check_declared(function, ("reward", "mask", "seq", "group"))
        function = _checked_and_documented(function)
        declared = Estimator(function, group_of_one, aggregation, by_token, looks_at, *_keywords(function))
        ADVANTAGES.update(dict.fromkeys((function.__name__, *verl_names), declared))
        return function

    return declare


def policy_loss(
    *verl_names: str,
    aggregation: str | None = None,
    by_response: bool = False,
    one_advantage: bool = False,
    has_ratio: bool = True,
    trains_all: bool = False,
    chooses: Callable[..., Tensor] | None = None,
) -> Callable:
    """Register a function in POLICY_LOSSES under its name and verl's. The keywords are those of `PolicyLoss`."""

    _check_parentheses("policy_loss", verl_names)

    def declare(function: Callable) -> Callable:
        _check_declared(function, ("log_prob", "old_log_prob", "advantage", "mask", "seq"))
        if "chosen" in _keywords(function)[0] and chooses is None:
            raise ValueError(
                f"{function.__name__} takes `chosen`: its decorator needs chooses=, the function that chooses tokens."
            )
        if (by_response or one_advantage) and aggregation is None:
            raise ValueError(f"{function.__name__} is by response: its decorator needs aggregation=, that of its paper.")
        function = _returns_loss(_checked_and_documented(function))
        of_choice = _keywords(chooses) if chooses else ((), {})
        kind = (aggregation, by_response, one_advantage, has_ratio, trains_all, chooses)
        declared = PolicyLoss(function, *kind, *_keywords(function), *of_choice)
        POLICY_LOSSES.update(dict.fromkeys((function.__name__, *verl_names), declared))
        return function

    return declare


def _keywords(function: Callable) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return the names of a function's keyword-only tensors, and its keyword-only numbers with their defaults."""
    keywords = [k for k in inspect.signature(function).parameters.values() if k.kind is k.KEYWORD_ONLY]
    knobs = {k.name: k.default for k in keywords if isinstance(k.default, bool | int | float)}
    return tuple(k.name for k in keywords if k.name not in knobs), knobs


def _checked_and_documented(function: Callable) -> Callable:
    """Return the function with a check of its input's layout, and with its tensors' shapes in its docstring."""
    function = _checked(function)
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{_shapes(function)}".strip()
    return function


def _shapes(function: Callable) -> str:
    """Return a line for `help`: the shapes of the tensors taken and returned. Empty if no argument is annotated as Tensor."""
    names = [name for name, k in inspect.signature(function).parameters.items() if k.annotation in (Tensor, "Tensor")]
    if not names:
        return ""
    per_token = ", ".join(name for name in names if name not in PER_RESPONSE)
    others = {shape: [name for name in names if PER_RESPONSE.get(name) == shape] for shape in PER_RESPONSE.values()}
    of_responses = "".join(f"; {', '.join(those)} {shape}" for shape, those in others.items() if those)
    made = "[N]" if inspect.signature(function).return_annotation in (Tensor, "Tensor") else "loss [N], {statistic: [N]}"
    return f"Shapes: {per_token} [N]{of_responses} -> {made}."


def _checked(function: Callable) -> Callable:
    """Let the function raise ValueError for input in another layout. Tensors are per token, except those in PER_RESPONSE."""
    parameters = inspect.signature(function).parameters
    # Needed are tensors; others are knobs, or may be None
    needed = {name for name, k in parameters.items() if k.default is k.empty and "None" not in str(k.annotation)}

    @functools.wraps(function)
    def checked(*args, **keywords):
        given = dict(zip(parameters, args, strict=False)) | keywords
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor) or name in needed}
        _check_tokens(function.__name__, **{name: x for name, x in tensors.items() if name not in PER_RESPONSE})
        if "group" in given and "seq" in given:
            _check_group(function.__name__, given["seq"], given["group"])
            others = {name: x for name, x in tensors.items() if name in PER_RESPONSE}
            _check_responses(function.__name__, len(given["group"]), **others)
        return function(*args, **keywords)

    return checked


def _returns_loss(function: Callable) -> Callable:
    """Let the policy loss raise ValueError if it returns anything but a Loss. Only types and shapes are checked."""

    @functools.wraps(function)
    def checked(log_prob: Tensor, *args, **keywords):
        made = function(log_prob, *args, **keywords)
        has_two = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)
        if has_two and all(isinstance(x, Tensor) and x.shape == log_prob.shape for x in (made[0], *made[1].values())):
            return made
        parts = (made[0], *made[1].values()) if has_two else made if isinstance(made, tuple) else (made,)
        found = ", ".join(str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in parts)
        raise ValueError(
            f"{function.__name__} returned {found}. A policy loss returns (token_loss [n], stats): the loss of each token, not "
            f"aggregated, and a dict of statistics, each [n] or the dict empty; here n is {len(log_prob)}."
        )

    return checked


def _check_parentheses(decorator: str, verl_names: tuple) -> None:
    if verl_names and callable(verl_names[0]):
        raise ValueError(f"{verl_names[0].__name__}: write @{decorator}() above it, with parentheses.")


def _check_declared(function: Callable, wanted: tuple[str, ...]) -> None:
    """Raise ValueError unless the arguments before the `*` are those wanted."""
    parameters = inspect.signature(function).parameters.values()
    found = tuple(k.name for k in parameters if k.kind is not k.KEYWORD_ONLY)
    if found != wanted:
        raise ValueError(
            f"{function.__name__} takes ({', '.join(found)}). It has to take ({', '.join(wanted)}); numbers of its own, with "
            "their defaults, and further tensors stand behind a `*`."
        )


# ----------------------------------------------------------------------------------------------------------------- advantages
# f(reward [N], mask [N], seq [N], group [B]) -> advantage [N], 0 outside the mask, over the GLOBAL batch; some take further
# keywords. `reward` is per token (the score on the last token, KL penalties on each). A response's s is the sum over ALL its
# tokens, not only the trained ones, so that a score on a masked last token is not lost.
#
# mean_g, std_g and n only count the group's responses with a trained token; one without (it could not be scored, or was
# rejected) is not in the group at all. They are computed in float64, from distances to the group's lowest score: equal scores
# give exactly 0 for any score, n and dtype, while scores one ulp apart still differ.


@advantage_estimator(group_of_one="score", looks_at="scores")
def grpo(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A = (s - mean_g) / (std_g + eps), std with Bessel's correction; in a group of one mean 0 and std 1: A = s / (1 + eps).

    Group Relative Policy Optimization, arXiv 2402.03300, section 4.1.2. Equal scores in a group give exactly 0.
    """
    centered, score, index = _centered(reward, mask, seq, group)
    alone = _group_sum(torch.ones_like(score), index) == 1
    advantage = torch.where(alone, score / (1 + eps), centered / (_group_std(centered, index) + eps))
    return _masked_tokens(advantage, reward, mask, seq)


@advantage_estimator(group_of_one="zero", looks_at="scores")
def grpo_batch_std(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A = (s - mean_g) / (std + eps), std over all scores of the batch, with Bessel's correction: advantages are not inflated
    in groups whose scores hardly differ. Lite PPO, arXiv 2508.08221; ScaleRL, arXiv 2510.13786. A group of one gives 0."""
    centered, score, _ = _centered(reward, mask, seq, group)
    scores = score[trained_sequences(mask, seq)]
    std = (scores - scores[:1]).std() if len(scores) > 1 else 0.0
    return _masked_tokens(centered / (std + eps), reward, mask, seq)


@advantage_estimator(group_of_one="zero", looks_at="scores")
def maxrl(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A = (s - mean_g) / mean_g, 0 if mean_g <= eps. With scores of 0 and 1 this is the gradient of log(pass rate), with its
    expansion sum_k grad(pass@k) / k cut off at k = n - 1. A group of one gives 0.

    Maximum Likelihood RL (MaxRL), arXiv 2602.02710, algorithm 1.
    """
    centered, score, _ = _centered(reward, mask, seq, group)
    mean = score - centered
    return _masked_tokens(torch.where(mean > eps, centered / mean.clamp(min=eps), 0.0), reward, mask, seq)


@advantage_estimator(group_of_one="zero", aggregation="seq-mean-token-sum-norm", looks_at="scores")
def dr_grpo(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor) -> Tensor:
    """A = s - mean_g: GRPO without the division by the standard deviation, which favours easy and hard prompts.

    Dr.GRPO, arXiv 2503.20783, section 3.2; its aggregation is seq-mean-token-sum-norm. A group of one gives 0.
    """
    return _masked_tokens(_centered(reward, mask, seq, group)[0], reward, mask, seq)


@advantage_estimator(group_of_one="zero", looks_at="scores")
def rloo(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor) -> Tensor:
    """A = n / (n - 1) * (s - mean_g), which is s minus the mean of the other n - 1; a group of one gives 0.

    REINFORCE leave-one-out, arXiv 2402.14740.
    """
    centered, _, index = _centered(reward, mask, seq, group)
    size = _group_sum(torch.ones_like(centered), index)
    return _masked_tokens(size / (size - 1).clamp(min=1) * centered, reward, mask, seq)


@advantage_estimator("reinforce_plus_plus", by_token=True)
def reinforce_pp(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor, *, gamma: float = 1.0) -> Tensor:
    """A_t = whiten(sum over k >= t of gamma^(k - t) r_k), whitened over the trained tokens of the batch; no groups.

    REINFORCE++, arXiv 2501.03262. A differs from token to token if rewards do, or if gamma < 1.
    """
    return whiten(return_to_go(reward, mask, seq, gamma), mask)


@advantage_estimator("reinforce_plus_plus_baseline", group_of_one="zero")
def reinforce_pp_baseline(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor) -> Tensor:
    """A = whiten(s - mean_g), whitened over the trained tokens of the batch. REINFORCE++ with baseline, arXiv 2501.03262.

    Equal scores, and a group of one, have s - mean_g = 0 exactly; whitening shifts that by the batch's mean over tokens, which
    is not 0 if long and short responses score differently.
    """
    centered = _centered(reward, mask, seq, group)[0]
    return whiten(to_tokens(centered, seq), mask).to(reward.dtype)


@advantage_estimator(by_token=True, looks_at="response")
def remax(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor, *, baseline: Tensor) -> Tensor:
    """A_t = sum over k >= t of r_k, minus baseline [B]: the score of the greedy response to the same prompt.

    ReMax, arXiv 2310.10505.
    """
    return torch.where(mask, return_to_go(reward, mask, seq) - to_tokens(baseline.to(reward.dtype), seq), 0.0)


@advantage_estimator(group_of_one="zero")
def opo(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor) -> Tensor:
    """A = s - sum_g(len s) / sum_g(len), len = trained tokens: the variance-optimal baseline if gradients grow with length.

    On-Policy RL with Optimal baseline, arXiv 2505.23585. Equal scores, and a group of one, give exactly 0.
    """
    centered, _, index = _centered(reward, mask, seq, group)
    length = sequence_sum(mask.double(), seq, len(group))
    baseline = _group_sum(length * centered, index) / _group_sum(length, index).clamp(min=1)
    return _masked_tokens(centered - baseline, reward, mask, seq)


@advantage_estimator("tir_optimal_token_baseline", group_of_one="score", by_token=True)
def optimal_token_baseline(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor, *, energy: Tensor) -> Tensor:
    """A_t = G_t - B_t, G_t = sum over k >= t of r_k, B_t = sum_g(W_t G_t) / (sum_g(W_t) + 1e-8) over the group's responses that
    have a t-th trained token; W_t is the sum of a response's energy [N] up to t. B_t is 0 if only one response is that long.

    Optimal Token Baseline, arXiv 2602.07078: the variance is least if energy is the squared norm of a token's gradient. The
    proxy for it is that of the logits' gradient, 1 - 2 p(token) + sum_v p(v)^2. Steps are the trained tokens, as in verl's
    tir_optimal_token_baseline, but without its importance weights. With equal scores B_t is exactly the score.
    """
    _, score, index = _centered(reward, mask, seq, group)
    kept = mask.nonzero()[:, 0]  # [M]
    s = seq[kept]
    energy = energy[kept].double()
    sizes = torch.bincount(s, minlength=len(group))  # [B]
    first = (sizes.cumsum(0) - sizes)[s]  # where each one's response begins
    spent = energy.cumsum(0)
    weight = spent - (spent - energy)[first]
    longest = int(sizes.max()) if len(s) else 0
    of_group = torch.unique(index, return_inverse=True)[1][s]
    cell = of_group * longest + torch.arange(len(s), device=s.device) - first  # one for each group and t
    ahead = return_to_go(reward.double(), mask, seq)[kept]
    above = ahead - _group_min(score, index)[s]

    def sum_g(x: Tensor) -> Tensor:
        return x.new_zeros(len(group) * longest).index_add(0, cell, x)[cell]

    baseline = sum_g(weight * above) / (sum_g(weight) + 1e-8)
    advantage = torch.where(sum_g(torch.ones_like(weight)) > 1, above - baseline, ahead)
    return torch.zeros_like(reward).index_copy(0, kept, advantage.to(reward.dtype))


@advantage_estimator(group_of_one="zero", looks_at="scores")
def grpo_passk(
    reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """A = (best - second best) / (std_g + eps) for the best response of a group, else 0; without norm_by_std undivided.

    Inference-time objectives, here the best of n, arXiv 2503.19595. A tie for the best and a group of one give 0 to all.
    """
    centered, score, index = _centered(reward, mask, seq, group)
    best = score == -_group_min(-score, index)
    lead = score + _group_min(torch.where(best, torch.inf, -score), index)
    alone = best & (_group_sum(best.double(), index) == 1) & lead.isfinite()
    advantage = lead / (_group_std(centered, index) + eps) if norm_by_std else lead
    return _masked_tokens(torch.where(alone, advantage, 0.0), reward, mask, seq)


@advantage_estimator(group_of_one="zero", looks_at="scores")
def gpg(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor) -> Tensor:
    """A = alpha (s - mean_g), alpha = responses / responses in groups whose scores differ, to compensate for groups without
    signal. Neither number counts responses without a trained token.

    Group Policy Gradient, arXiv 2504.02546 (verl divides by the number of non-zero scores instead). A group of one gives 0.
    """
    centered, score, index = _centered(reward, mask, seq, group)
    trained = torch.zeros(len(group), dtype=torch.bool, device=mask.device).index_fill(0, trained_sequences(mask, seq), True)
    differ = trained & (_group_min(score, index) != -_group_min(-score, index))
    alpha = trained.sum().double() / differ.sum().clamp(min=1)
    return _masked_tokens(alpha * centered, reward, mask, seq)


@advantage_estimator(group_of_one="zero", looks_at="scores")
def gdpo(
    reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor, *, parts: Tensor, weights: Tensor, eps: float = 1e-6
) -> Tensor:
    """A = S / (std(S) + eps), S = sum_k weights_k (r_k - mean_g r_k) / (std_g r_k + eps) with r_k column k of parts: several
    rewards, each normalised within the group; std(S) over the responses of the whole batch, where the mean of S is 0. The sum
    of the rewards, `reward`, is not used.

    Group reward-Decoupled Normalization Policy Optimization (GDPO), arXiv 2601.05242, eqs. 4 to 6 (verl takes the last std over
    tokens). A group of one gives 0.
    """
    index = _group_index(mask, seq, group)
    total = torch.zeros(len(group), dtype=torch.float64, device=reward.device)
    for r, weight in zip(parts.double().unbind(1), weights.double(), strict=True):
        centered = _above_mean(r, index)
        total = total + weight * centered / (_group_std(centered, index) + eps)
    compared = total[trained_sequences(mask, seq)]
    std = compared.std() if len(compared) > 1 else 0.0
    return _masked_tokens(total / (std + eps), reward, mask, seq)


@advantage_estimator(by_token=True)
def gae(
    reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor, *, value: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> Tensor:
    """A = whiten(lambda_return - V), value [N] from a critic. Generalized Advantage Estimation, arXiv 1506.02438, eq. 16.

    The critic's target is `lambda_return`, a separate function.
    """
    return whiten(lambda_return(reward, mask, seq, value, gamma, lam) - value, mask)


def _centered(reward: Tensor, mask: Tensor, seq: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return s - mean_g and s of each response, in float64, and the index of its group, below 2B; [B] each."""
    index = _group_index(mask, seq, group)
    score = sequence_sum(reward.double(), seq, len(group))
    return _above_mean(score, index), score, index


def _group_index(mask: Tensor, seq: Tensor, group: Tensor) -> Tensor:
    """Return the index of each response's group, below 2B; [B]."""
    index = len(group) + torch.arange(len(group), device=group.device)  # without a trained token: a group of its own
    trained = trained_sequences(mask, seq)
    index[trained] = torch.unique(group[trained], return_inverse=True)[1]
    return index


def _above_mean(score: Tensor, index: Tensor) -> Tensor:
    """Return score - mean_g of each response; [B]."""
    above = score - _group_min(score, index)
    return above - _group_sum(above, index) / _group_sum(torch.ones_like(above), index)


def _group_sum(x: Tensor, index: Tensor) -> Tensor:
    """Return each response's sum of x [B] over its group, [B]. index [B]: below 2B."""
    return x.new_zeros(2 * len(x)).index_add(0, index, x)[index]


def _group_min(x: Tensor, index: Tensor) -> Tensor:
    """Return each response's minimum of x [B] over its group, [B]. index [B]: below 2B."""
    return x.new_full((2 * len(x),), torch.inf).scatter_reduce(0, index, x, "amin")[index]


def _group_std(centered: Tensor, index: Tensor) -> Tensor:
    """Return the standard deviation of each response's group [B], with Bessel's correction; 0 in a group of one."""
    size = _group_sum(torch.ones_like(centered), index)
    return (_group_sum(centered**2, index) / (size - 1).clamp(min=1)).sqrt()


def _masked_tokens(advantage: Tensor, reward: Tensor, mask: Tensor, seq: Tensor) -> Tensor:
    """Expand advantage [B] to [N] in the reward's dtype, 0 outside the mask."""
    return torch.where(mask, to_tokens(advantage.to(reward.dtype), seq), 0.0)


# -------------------------------------------------------------------------------------------------------------- policy losses
# f(log_prob [N], old_log_prob [N], advantage [N], mask [N], seq [N]) -> Loss. Keywords of a loss are further tensors [N], and
# knobs, whose defaults are those of the paper unless the docstring says otherwise. A loss is per token, not aggregated, and so
# are the detached statistics. Only log_prob carries a gradient. Statistics, bool: pg_clipfrac, tokens whose gradient the clip
# removed; pg_clipfrac_lower, those whose gradient a second clip removed. Before exp, d is clamped to at most 20; it needs no
# lower bound, because exp(-20) is 0 for all purposes.


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """d = log_prob - old_log_prob, [N]; 0 outside the mask, so that nothing non-finite there reaches loss or gradient."""
    _check_tokens("log_ratio", log_prob=log_prob, old_log_prob=old_log_prob, mask=mask)
    return torch.where(mask, log_prob - old_log_prob, 0.0)


def importance_weight(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor, *, cap: float = 20.0) -> Tensor:
    """min(r, cap), detached, [N]: the factor for a loss without a ratio. Exactly 1 if the policy is the old one. The cap only
    matters for outliers."""
    return log_ratio(log_prob.detach(), old_log_prob, mask).clamp(max=math.log(cap)).exp()


@policy_loss("vanilla")
def ppo_clip(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
) -> Loss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(clamp(d, +-20)); where A < 0 at most -A c (dual clip).

    PPO, arXiv 1707.06347, eq. 7 (low = high = 0.2); DAPO's clip-higher, arXiv 2503.14476, section 3.1 (high = 0.28); dual clip,
    arXiv 1912.09729 (c = 3).
    pg_clipfrac_lower: tokens whose gradient the dual clip removed.
    """
    d = log_ratio(log_prob, old_log_prob, mask)
    plain, clipped = _clip_pair(d.clamp(max=20).exp(), advantage, clip_low, clip_high)
    bound = -advantage * clip_c
    loss = torch.where(advantage < 0, torch.minimum(clipped, bound), clipped)
    return loss, {"pg_clipfrac": clipped > plain, "pg_clipfrac_lower": (clipped > bound) & (advantage < 0)}


@policy_loss(aggregation="seq-mean-token-mean")
def gspo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    clamp: float = 10.0,
) -> Loss:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), s_t = exp(min(lp - sg(lp) + sg(mean_t d), clamp)): one ratio per sequence, the
    geometric mean of its tokens' ratios, with a gradient through each token. Aggregation: seq-mean-token-mean, as verl's
    gspo has it whatever loss_agg_mode says; verl 0.9.1 alone honours it. With token-mean responses count by their length.

    GSPO-token, arXiv 2507.18071, eq. 14 (low 3e-4, high 4e-4 in section 5.1), which equals GSPO if A is one number per
    sequence. No dual clip. pg_clipfrac counts whole sequences, token by token.
    """
    d = log_ratio(log_prob, old_log_prob, mask)
    (level,) = sequence_means(mask, seq, d.detach())
    level = to_tokens(level, seq)  # [N], the same on a sequence's tokens
    s = (d - d.detach() + level).clamp(max=clamp).exp()
    plain, clipped = _clip_pair(s, advantage, clip_low, clip_high)
    return clipped, {"pg_clipfrac": clipped > plain}


@policy_loss(aggregation="seq-mean-token-sum")
def luspo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> Loss:
    """gspo with each sequence's loss times its length, by the aggregation seq-mean-token-sum: gspo's 1 / length favours short
    sequences among good ones. LUSPO, arXiv 2602.05261 (low 2e-3, high 2.5e-3 in section 5.1)."""
    return gspo(log_prob, old_log_prob, advantage, mask, seq, clip_low=clip_low, clip_high=clip_high)


@policy_loss("geo_mean", aggregation="seq-mean-token-mean", by_response=True, one_advantage=True)
def gmpo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Loss:
    """-A_i exp(mean_t u_t) on each token of sequence i, u_t = sgn(A) min(sgn(A) d, sgn(A) clip(d, -low, high)): the
    geometric mean of token ratios, clipped per token in the logarithm. A_i: mean of A. Aggregation: seq-mean-token-mean.

    GMPO, arXiv 2507.20673, eq. 4 (low = high = 0.4); the exponent is clamped to +-20. pg_clipfrac: clipped tokens with A > 0,
    pg_clipfrac_lower: with A < 0. If tokens have importance weights, a response is weighted by their arithmetic mean (in verl
    by their geometric mean, which is the weight at the level sequence_geometric).
    """
    d = log_ratio(log_prob, old_log_prob, mask)
    sign = advantage.sign()
    clipped = d.clamp(-clip_low, clip_high)
    u = sign * torch.minimum(sign * d, sign * clipped)  # 0 outside the mask, as d is
    count = sequence_sum(mask.to(d.dtype), seq).clamp(min=1)  # [B]
    level = sequence_sum(torch.where(mask, advantage, 0.0), seq) / count
    loss = -level * (sequence_sum(u, seq) / count).clamp(-20, 20).exp()
    out = u.detach() != d.detach()
    return to_tokens(loss, seq), {"pg_clipfrac": out & (advantage > 0), "pg_clipfrac_lower": out & (advantage < 0)}


@policy_loss()
def cispo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
) -> Loss:
    """-sg(clip(r, 1 - low, 1 + high)) A lp, d clamped to +-20: the weight is clipped, no token loses its gradient.

    CISPO, arXiv 2506.13585, eqs. 4 and 5, which has no lower bound (low = 1) and tunes high (0.2 here). pg_clipfrac: tokens
    whose weight was clipped.
    """
    d = log_ratio(log_prob.detach(), old_log_prob, mask)
    least = math.log(1 - clip_low) if clip_low < 1 else -20.0
    clipped = d.clamp(least, math.log(1 + clip_high))  # clip(exp(d)) = exp(clip(d))
    out = clipped != d
    weight = clipped.exp_().mul_(advantage).neg_()
    return weight * torch.where(mask, log_prob, 0.0), {"pg_clipfrac": out}


@policy_loss(aggregation="seq-mean-token-mean")
def sapo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Loss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg; d clamped to +-20: a gate that closes
    smoothly instead of a clip. Aggregation: seq-mean-token-mean.

    Soft Adaptive Policy Optimization (SAPO), arXiv 2511.20347, eqs. 5 and 6.
    """
    d = log_ratio(log_prob, old_log_prob, mask)
    tau = torch.where(advantage > 0, d.new_tensor(tau_pos), d.new_tensor(tau_neg))
    gate = torch.sigmoid(tau * (d.clamp(max=20).exp() - 1)) * 4 / tau
    return -advantage * gate, {}


@policy_loss("gpg", has_ratio=False)
def reinforce(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, seq: Tensor) -> Loss:
    """-A lp: the plain policy gradient, without a ratio. On data of another policy, multiply it by `importance_weight`, as the
    scripts do. Loss of Group Policy Gradient, arXiv 2504.02546."""
    return -advantage * torch.where(mask, log_prob, 0.0), {}


def score_centering(expected_log_prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """A E, [N], 0 outside the mask. Added to `reinforce` it makes -A (lp - E), which needs no importance weight. E = sum_v
    sg(q_v) lp_v [N], with gradient, over all tokens v that could be sampled, q_v their probabilities under the sampler.

    On tokens that the sampler draws, the expected gradient of lp is that of E, which is not 0 if sampler and policy differ.
    REINFORCE without a ratio adds it to each step, times the mean of A: a drift. Subtracting E removes it.

    Score centering, arXiv 2609.20807, eq. 9. Here the sum is over the whole support, so the paper's model of the tail is not
    needed.
    """
    _check_tokens("score_centering", expected_log_prob=expected_log_prob, advantage=advantage, mask=mask)
    return advantage * torch.where(mask, expected_log_prob, 0.0)


@policy_loss(trains_all=True)
def dro(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, seq: Tensor, *, beta: float = 0.05) -> Loss:
    """-A lp + beta / 2 d^2: the squared distance to the sampling policy instead of a ratio or a clip, also for old data.

    Direct Reward Optimization, arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599, which squares a response's sum of d. Token by
    token as in Tinker (beta 0.05) and verl (no default).
    """
    d = log_ratio(log_prob, old_log_prob, mask)
    return -advantage * torch.where(mask, log_prob, 0.0) + beta / 2 * d**2, {}


@policy_loss()
def vespo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    k_pos: float = 2.0,
    k_neg: float = 3.0,
    lam_pos: float = 3.0,
    lam_neg: float = 2.0,
) -> Loss:
    """-A sg(w^k exp(lam (1 - w))) lp, w = exp(sum_t d) of the whole sequence, its logarithm clamped to +-20; k, lam are k_pos,
    lam_pos where A >= 0, else k_neg, lam_neg. The weight is 1 on policy and falls to 0 on both sides, without a clip.

    VESPO, arXiv 2602.10693, eq. 20 (there c1 and c2; 2, 3 and 3, 2 in section 4.1).
    """
    d = log_ratio(log_prob.detach(), old_log_prob, mask)
    log_w = to_tokens(sequence_sum(d, seq).clamp(-20, 20), seq)
    good = advantage >= 0
    k, lam = (torch.where(good, d.new_tensor(a), d.new_tensor(b)) for a, b in ((k_pos, k_neg), (lam_pos, lam_neg)))
    weight = (k * log_w + lam * (1 - log_w.exp())).exp()
    return -advantage * weight * torch.where(mask, log_prob, 0.0), {}


def covariance(log_prob: Tensor, advantage: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """(A - mean A)(lp - mean lp), means over the trained tokens, [N]; `fill` outside the mask. Detached."""
    _check_tokens("covariance", log_prob=log_prob, advantage=advantage, mask=mask)
    a, lp = torch.where(mask, advantage, 0.0), torch.where(mask, log_prob.detach(), 0.0)
    count = mask.count_nonzero().clamp(min=1)
    product = a.sub_(a.sum() / count).mul_(lp.sub_(lp.sum() / count))
    return torch.where(mask, product, fill)


def top_covariance(log_prob: Tensor, advantage: Tensor, mask: Tensor, *, ratio: float = 2e-4) -> Tensor:
    """Return the max(1, int(ratio * trained tokens)) trained tokens with the largest covariance: bool [N]."""
    cov = covariance(log_prob, advantage, mask, fill=-torch.inf)
    total = int(mask.count_nonzero())
    top = cov.topk(min(total, max(1, int(ratio * total))), sorted=False).indices
    return torch.zeros_like(mask).index_fill_(0, top, True)


def random_covariance(
    log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    ratio: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    among: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw max(1, int(ratio * trained tokens)) of the tokens with low < covariance < high (and in `among`, [N] bool), or all of
    them if there are fewer: bool [N]. Give every rank the same generator."""
    cov = covariance(log_prob, advantage, mask)
    allowed = (cov > low) & (cov < high) & mask & (mask if among is None else among)
    candidates = allowed.nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=generator, device=generator.device if generator else None)
    count = max(1, int(ratio * int(mask.count_nonzero())))
    return torch.zeros_like(mask).index_fill(0, candidates[order[:count].to(candidates.device)], True)


@policy_loss(chooses=random_covariance)
def clip_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    chosen: Tensor | None = None,
) -> Loss:
    """ppo_clip without dual clip, and 0 on the `chosen` [N] (bool) tokens: a few of those that lower the entropy most.

    Clip-Cov, arXiv 2505.22617, eqs. 10 to 12. To be independent of micro-batches, choose once: `chosen =
    random_covariance(old_log_prob, ...)` on the whole mini-batch (exact in the first update, whose policy is the old one). If
    None, tokens are chosen among the unclipped ones of this call, at least one in each micro-batch. pg_clipfrac: chosen tokens;
    pg_clipfrac_lower: those whose gradient the ratio's clip removed.
    """
    d = log_ratio(log_prob, old_log_prob, mask)
    plain, clipped = _clip_pair(d.clamp(max=20).exp(), advantage, clip_low, clip_high)
    if chosen is None:
        chosen = random_covariance(log_prob, advantage, mask, among=mask & (clipped <= plain))
    chosen = chosen & mask
    return torch.where(chosen, 0.0, clipped), {"pg_clipfrac": chosen, "pg_clipfrac_lower": clipped > plain}


@policy_loss(chooses=top_covariance)
def kl_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    coef: float = 1.0,
    chosen: Tensor | None = None,
) -> Loss:
    """-A r (d clamped to +-20), plus coef |d| on the `chosen` [N] (bool) tokens: those of the largest covariance.

    KL-Cov, arXiv 2505.22617, eqs. 13 and 14, whose coef is 1 (verl's ppo_kl_coef has the default 0.1). Choose once on the
    mini-batch, `chosen = top_covariance(old_log_prob, ...)`, as in `clip_cov`; if None, tokens are chosen among those of this
    call. pg_clipfrac: chosen tokens. |d| has no gradient at d = 0.
    """
    d = log_ratio(log_prob, old_log_prob, mask)
    chosen = top_covariance(log_prob, advantage, mask) if chosen is None else chosen & mask
    index = chosen.nonzero()[:, 0]  # few: the penalty is computed for these only
    loss = -advantage * d.clamp(max=20).exp()
    return loss.index_add(0, index, coef * d.index_select(0, index).abs()), {"pg_clipfrac": chosen}


@policy_loss()
def dppo_tv(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 20.0,
) -> Loss:
    """-A sg(min(r, c)) lp where p - p_old <= high (A > 0) or >= -low (A <= 0), else 0; d clamped to +-20. The trust region is
    in the difference of probabilities (total variation), not in their ratio, which is noisy for rare tokens.

    DPPO, arXiv 2602.04879. pg_clipfrac: tokens left out; pg_clipfrac_lower: other tokens whose ratio exceeds c.
    """
    lp, old = (torch.where(mask, x, 0.0) for x in (log_prob, old_log_prob))
    moved = lp.detach().exp() - old.exp()
    out = torch.where(advantage > 0, moved > clip_high, moved < -clip_low)
    return _left_in(out, lp, old, advantage, clip_c)


@policy_loss()
def dppo_kl(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    clip_c: float = 20.0,
) -> Loss:
    """dppo_tv with the trust region in `binary_kl` from the old policy to this one: a token is left out if the KL is above high
    and p > p_old (A > 0), or above low and p < p_old (A <= 0). DPPO, arXiv 2602.04879, Binary-KL; the same statistics."""
    lp, old = (torch.where(mask, x, 0.0) for x in (log_prob, old_log_prob))
    d = lp.detach() - old
    kl = binary_kl(old, lp.detach())
    out = torch.where(advantage > 0, (kl > clip_high) & (d > 0), (kl > clip_low) & (d < 0))
    return _left_in(out, lp, old, advantage, clip_c)


def _left_in(out: Tensor, lp: Tensor, old: Tensor, advantage: Tensor, cap: float) -> Loss:
    """-A sg(min(r, cap)) lp on the tokens that are not `out`, else 0; lp, old [N]: log-probs, 0 outside the mask."""
    ratio = (lp.detach() - old).clamp(max=20).exp()
    weight = torch.where(out, 0.0, ratio.clamp(max=cap))
    return -advantage * weight * lp, {"pg_clipfrac": out, "pg_clipfrac_lower": (ratio > cap) & ~out}


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of the two outcomes "this token" and "another token", [N]: p log(p / q) + (1 - p) log((1 - p) / (1 - q)), with
    1 - p and 1 - q at least 1e-8."""
    other_p, other_q = ((-torch.expm1(x)).clamp(min=1e-8) for x in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + other_p * (other_p / other_q).log()


@policy_loss()
def decoupled_ppo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
    cap: float = 5.0,
    rollout_log_prob: Tensor,
) -> Loss:
    """ppo_clip's loss times sg(min(exp(old - roll), cap)): `old_log_prob` is from the proximal policy, recomputed by the
    learner, `rollout_log_prob` [N] from the behaviour policy, which sampled the tokens and may be many versions older.

    AReaL, arXiv 2505.24298, eqs. 4 and 5. Statistics: those of ppo_clip, and behav_clipfrac, tokens whose weight exceeds the
    cap (AReaL drops those instead).
    """
    clips = {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c}
    loss, stats = ppo_clip(log_prob, old_log_prob, advantage, mask, seq, **clips)
    weight = log_ratio(old_log_prob, rollout_log_prob, mask).detach().clamp(-20, 20).exp()
    return loss * weight.clamp(max=cap), stats | {"behav_clipfrac": weight > cap}


def _clip_pair(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return -A r and max(-A r, -A clip(r, 1 - low, 1 + high)), [N] each; if they differ, the clip removed the gradient."""
    plain = -advantage * ratio
    return plain, torch.maximum(plain, -advantage * ratio.clamp(1 - low, 1 + high))


# --------------------------------------------------------------------------------------- tokens that a policy loss leaves out


def off_policy_tokens(
    log_prob: Tensor, rollout_log_prob: Tensor, advantage: Tensor, mask: Tensor, seq: Tensor, *, threshold: float
) -> Tensor:
    """Return the tokens that a loss may leave out, bool [N]: those with A < 0 in responses that have become less likely since
    they were sampled, with mean_t(rollout - log_prob) > threshold.

    DeepSeek-V3.2's off-policy sequence masking, arXiv 2512.02556, eq. 9.
    """
    tokens = {"log_prob": log_prob, "rollout_log_prob": rollout_log_prob, "advantage": advantage, "mask": mask, "seq": seq}
    _check_tokens("off_policy_tokens", **tokens)
    (drift,) = sequence_means(mask, seq, log_ratio(rollout_log_prob, log_prob.detach(), mask))
    return mask & (advantage < 0) & to_tokens(drift > threshold, seq)


def high_entropy_tokens(entropy: Tensor, mask: Tensor, *, quantile: float) -> Tensor:
    """Return the share `quantile` of the trained tokens with the largest entropy [N] of the policy, and ties, as bool [N]: the
    policy loss can be restricted to them. High-entropy minority tokens, arXiv 2506.01939 (0.2); TRL's top_entropy_quantile."""
    _check_tokens("high_entropy_tokens", entropy=entropy, mask=mask)
    if not 0 < quantile <= 1:
        raise ValueError(f"high_entropy_tokens: quantile is {quantile}. It has to be above 0 and at most 1.")
    trained = entropy[mask]
    if not len(trained):
        return mask
    place = math.ceil(round((1 - quantile) * (len(trained) - 1), 6))  # rank, from 0, of the lowest entropy that is kept
    return mask & (entropy >= trained.kthvalue(place + 1).values)


# ----------------------------------------------------------------------------------------------------------------- the critic


def lambda_return(reward: Tensor, mask: Tensor, seq: Tensor, value: Tensor, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """R_t = V_t + sum over k >= t of (gamma lam)^(k - t) delta_k with delta_t = r_t + gamma V_{t+1} - V_t; [N].

    0 outside the mask. Steps are the trained tokens: masked tokens are skipped, and a reward on one goes to the trained token
    before it. VAPO's decoupled GAE, arXiv 2504.05118, takes lambda 1 for the critic's target and another for the policy.
    """
    _check_tokens("lambda_return", reward=reward, mask=mask, seq=seq, value=value)
    index, r = _steps(reward, mask, seq)
    v = torch.where(mask, value, 0.0)[index].to(r.dtype)
    s = seq[index]
    following = torch.cat([v[1:] * (s[1:] == s[:-1]), v.new_zeros(min(1, len(v)))])
    advantage = _discounted(r + gamma * following - v, s, gamma * lam)
    return torch.zeros_like(reward).index_copy(0, index, advantage + v)


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, mask: Tensor, *, clip: float = 0.5) -> Loss:
    """0.5 max((v - R)^2, (clip(v, v_old +- clip) - R)^2), all [N], for a critic; R from `lambda_return`. 0 outside the mask.

    vf_clipfrac: tokens whose gradient the clip removed. PPO, arXiv 1707.06347, as commonly implemented.
    """
    _check_tokens("value_loss", value=value, old_value=old_value, returns=returns, mask=mask)
    v, old, target = (torch.where(mask, x, 0.0) for x in (value, old_value, returns))
    plain = (v - target) ** 2
    clipped = (torch.clamp(v, old - clip, old + clip) - target) ** 2
    return 0.5 * torch.maximum(plain, clipped), {"vf_clipfrac": clipped > plain}


# -------------------------------------------------------------------------------------------------------- KL to the reference
# Estimators of KL(policy || reference) on tokens the policy sampled; f(x [N]) with x = log_prob - ref_log_prob. An unbiased
# value does not imply an unbiased gradient as a loss. See Schulman, "Approximating KL Divergence" (2020).


def k1(x: Tensor) -> Tensor:
    """x: unbiased in value, high variance, negative at times; as a loss its gradient is 0 in expectation."""
    return x


def k_abs(x: Tensor) -> Tensor:
    """|x|: biased in value; as a loss a pull of constant strength."""
    return x.abs()


def k2(x: Tensor) -> Tensor:
    """x^2 / 2: biased in value, but as a loss its gradient is that of the KL, unbiased."""
    return x**2 / 2


def k3(x: Tensor) -> Tensor:
    """clamp(exp(-x) - 1 + x, +-10), x clamped to +-20: unbiased in value, never negative ("low_var_kl"); as a loss its gradient
    is that of the reverse divergence, KL(reference || policy). KL of GRPO, arXiv 2402.03300, eq. 4."""
    x = x.clamp(-20, 20)
    return (torch.exp(-x) - 1 + x).clamp(-10, 10)


def with_unbiased_gradient(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `value` with the gradient of k2 (straight-through; verl's "+"): k1+ and k3+ are unbiased in value and gradient."""
    return lambda x: value(x).detach() + k2(x) - k2(x).detach()


KL_ESTIMATORS = {"k1": k1, "abs": k_abs, "k2": k2, "k3": k3} | {"kl": k1, "mse": k2, "low_var_kl": k3}  # and verl's names
KL_ESTIMATORS |= {f"{name}+": with_unbiased_gradient(value) for name, value in KL_ESTIMATORS.items()}


KL_LOSSES = (*KL_ESTIMATORS, "k3r")


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor, kind: str, old_log_prob: Tensor | None = None) -> Tensor:
    """Return the estimator `kind` (of KL_LOSSES) per token, [N]; 0 outside the mask. As a loss term its usual weight is 1e-3.
    In the reward, r_t - beta k_t, it is detached, and that of the policy before the step's first update.

    k3r is min(r, 20) k3, with r over old_log_prob [N]: unbiased in value and gradient, also on tokens that an older policy
    sampled. The gradient of r k3(x) is r x, like that of sg(r) k2(x). Plain k3 pushes tokens that have become very unlikely
    under the policy with an unbounded weight, and its mean is biased on stale tokens; so TRL weights it by default
    (use_bias_correction_kl).

    DeepSeek-V3.2's unbiased KL estimate, arXiv 2512.02556, section 3.1.
    """
    _check_word("KL estimator", kind, KL_LOSSES if old_log_prob is not None else KL_ESTIMATORS)
    _check_tokens("kl_penalty", log_prob=log_prob, ref_log_prob=ref_log_prob, mask=mask)
    if kind == "k3r":
        return kl_penalty(log_prob, ref_log_prob, mask, "k3+") * importance_weight(log_prob, old_log_prob, mask)
    return KL_ESTIMATORS[kind](log_ratio(log_prob, ref_log_prob, mask))


# ---------------------------------------------------------------------------------------------------------------- the teacher


def reverse_kl_advantage(log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor) -> Tensor:
    """-(lp - lt), detached, [N]; 0 outside the mask. With this advantage a policy gradient lowers KL(policy || teacher), one
    token at a time. lp is from the current policy, even if older weights sampled the token: the ratio weights it. With the old
    lp, nothing would keep the policy from collapsing onto the token with the largest lt - old lp.

    On-policy distillation (Lu et al., Thinking Machines, 2025; they take the sampler's lp, which on policy is the same). Each
    token only counts its own gap, not those of later tokens (a discount of 0). As a loss, k2 has the same gradient. If the
    teacher is the policy with the answer in its prompt: On-policy self-distillation (OPSD), arXiv 2601.18734; Self-distillation
    fine-tuning (SDFT), arXiv 2601.19897.
    """
    return -log_ratio(log_prob.detach(), teacher_log_prob, mask)


def top_k_reverse_kl(log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor) -> Tensor:
    """KL(policy || teacher) per token, [N], over K tokens of the vocabulary and one bucket for all others; 0 outside the mask
    [N]. log_prob, teacher_log_prob [N, K]: at the teacher's most likely tokens. The value is exact at each position whichever
    policy sampled the token, so it needs no ratio.

    sum_j p_j gap_j, gap = lp - lt, with j over the K tokens and the bucket, whose probability is at least 1e-6. The gradient is
    that of sum_k sg(p_k (gap_k - gap of the bucket)) lp_k, exactly 0 if the two agree.

    GKD with the reverse KL, arXiv 2306.13649. The bucket is TRL's: without it, mass outside the K tokens would cost nothing.
    """
    if log_prob.shape != teacher_log_prob.shape or log_prob.shape[:1] != mask.shape or log_prob.dim() != 2:
        found = f"log_prob {tuple(log_prob.shape)}, teacher_log_prob {tuple(teacher_log_prob.shape)}, mask {tuple(mask.shape)}"
        raise ValueError(f"top_k_reverse_kl: found {found}. The first two have to be [N, K], the mask [N].")
    lp, lt = (torch.where(mask[:, None], x, -1.0) for x in (log_prob, teacher_log_prob))
    p = lp.detach().exp()
    rest = [(1 - x.detach().exp().sum(1, keepdim=True)).clamp(min=1e-6) for x in (lp, lt)]
    gap = lp.detach() - lt  # [N, K]
    gap_of_rest = rest[0].log() - rest[1].log()  # [N, 1]
    value = (p * gap).sum(1) + (rest[0] * gap_of_rest)[:, 0]
    slope = (p * (gap - gap_of_rest) * lp).sum(1)
    return torch.where(mask, value + slope - slope.detach(), 0.0)


# ------------------------------------------------------------------------------------------ coefficients that follow a target


def adaptive_kl_coef(beta: float, kl: float, target: float, n: int, horizon: int) -> float:
    """beta * (1 + clip(kl / target - 1, +-0.2) * n / horizon): the coefficient of the next step.

    kl: the last step's, per token; n: responses it trained; horizon: in the same unit as n. Adaptive KL coefficient of Ziegler
    et al., arXiv 1909.08593.
    """
    return beta * (1 + max(-0.2, min(0.2, kl / target - 1)) * n / horizon)


def adaptive_entropy_coef(coef: float, entropy: float, target: float, delta: float, most: float) -> float:
    """coef + delta if entropy < target, coef - delta if it is above, kept from 0 to `most`: the coefficient of the next step.

    entropy: of the last step, per token. If it was above the target, the next step has no bonus at all (in the paper, this
    depends on the next step's own entropy). Skywork-OR1's adaptive entropy control, arXiv 2505.22312, eq. 3.2.
    """
    if entropy == target:
        return coef
    return min(most, max(0.0, coef + delta if entropy < target else coef - delta))


# --------------------------------------------------------------------------------------------------------- rollout correction
# The generator's log-probs differ from the learner's for the same tokens (different kernels, different precision, older
# weights). log w = log_prob (the learner's) - rollout_log_prob, clamped to +-20; a sum over a response is clamped again. The
# functions take the GLOBAL batch, [N] each; everything is detached.


IS_LEVELS = ("token", "sequence", "sequence_geometric")
REJECTION_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max", "batch")
DIVERGENCES = ("k1", "k2", "k3", "binary_kl")


def rollout_is_weights(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    level: str = "token",
    low: float | None = None,
    high: float = 2.0,
    normalize: bool = False,
) -> Tensor:
    """Return importance weights [N], 0 outside the mask, by which to multiply the token losses.

    level: token is w; sequence is exp(sum_t log w) on all tokens of a response; sequence_geometric is exp(mean_t log w); over
    trained tokens. Without `low`, weights are min(w, high), truncated importance sampling; with it, they are 0 outside the band
    from low to high, masked importance sampling: IcePop, arXiv 2510.18855. normalize: to a mean of 1 over the trained tokens,
    or, at the sequence levels, over the responses.
    """
    if not (low or 0) <= high or high <= 0:
        raise ValueError(f"rollout_is_weights: low is {low}, high is {high}. They have to be 0 <= low <= high, high above 0.")
    weight = bounded(rollout_ratio(log_prob, rollout_log_prob, mask, seq, level), low, high)
    if normalize:
        units = weight[mask] if level == "token" else sequence_means(mask, seq, weight)[0][trained_sequences(mask, seq)]
        weight = weight * len(units) / units.sum() if (units > 0).any() else weight
    return torch.where(mask, weight, 0.0)


def rollout_rejection_mask(
    log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, seq: Tensor, *, criteria: Sequence[tuple[str, str, float, float]]
) -> Tensor:
    """Return mask [N] without the tokens, or whole responses, whose log-probs disagree too much: bool [N].

    criteria: (level, divergence, low, high), all of which must hold. Levels: token; seq_sum; seq_mean (k1: the geometric mean
    of the ratios); seq_max (one bad token rejects the response); batch (the worst tokens are rejected until the mean of the
    others is at most high, or, as in AReaL, one is left; not for k1). Divergences: k1, a band on the ratio learner / generator
    itself (verl's band is on the inverse ratio); k2 = (log w)^2 / 2, k3 = w - log w - 1 and binary_kl, the larger of both
    directions' `binary_kl`, are only bounded by high. Usual values: seq_mean k1 0.999 to 1.001, seq_mean k3 0.01, seq_sum k1
    0.5 to 2.0; token binary_kl 2.0 (KPop, as AReaL has it). M2PO, arXiv 2510.01161, is batch k2 0.02 (as AReaL has it, whose
    bound is on (log w)^2: 0.04). Each criterion is applied to the given mask, not to what another one left.
    """
    _check_tokens("rollout_rejection_mask", log_prob=log_prob, rollout_log_prob=rollout_log_prob, mask=mask, seq=seq)
    log_weight = rollout_log_ratio(log_prob, rollout_log_prob, mask)
    lp, roll = (torch.where(mask, x.detach(), 0.0) for x in (log_prob, rollout_log_prob))
    kept = mask
    for level, divergence, low, high in criteria:
        _check_word("level of rejection", level, REJECTION_LEVELS)
        _check_word("divergence", divergence, DIVERGENCES[1:] if level == "batch" else DIVERGENCES)
        of_divergence = {
            "k1": lambda: log_weight,
            "k2": lambda: log_weight**2 / 2,
            "k3": lambda: log_weight.exp() - log_weight - 1,
            "binary_kl": lambda: torch.maximum(binary_kl(lp, roll), binary_kl(roll, lp)),
        }
        x = of_divergence[divergence]()
        if level == "seq_sum":
            x = to_tokens(sequence_sum(x, seq), seq)
        elif level == "seq_mean":
            x = to_tokens(*sequence_means(mask, seq, x), seq)
        x = x.clamp(-20, 20).exp() if divergence == "k1" else x
        fine = (x >= low) & (x <= high) if divergence == "k1" else x <= high
        if level == "batch":
            fine = _least(x, mask, high)
        if level == "seq_max":
            fine = to_tokens(sequence_sum((mask & ~fine).to(log_weight.dtype), seq), seq) == 0
        kept = kept & fine
    return kept


def _least(x: Tensor, mask: Tensor, most: float) -> Tensor:
    """Return the trained tokens with the smallest x, as many as have a mean of at most `most`, and at least one: bool [N]."""
    order = torch.where(mask, x, torch.inf).argsort(stable=True)[: int(mask.count_nonzero())]
    means = x[order].double().cumsum(0) / torch.arange(1, len(order) + 1, device=x.device)
    return torch.zeros_like(mask).index_fill(0, order[: max(1, int((means <= most).count_nonzero()))], True)


def rollout_log_ratio(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return log w [N], detached; 0 outside the mask."""
    return log_ratio(log_prob.detach(), rollout_log_prob.detach(), mask).clamp(-20, 20)


def rollout_ratio(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, seq: Tensor, level: str) -> Tensor:
    """Return the importance ratio [N] at a level of IS_LEVELS, before any bound."""
    _check_word("level of importance weights", level, IS_LEVELS)
    _check_tokens("rollout_ratio", log_prob=log_prob, rollout_log_prob=rollout_log_prob, mask=mask, seq=seq)
    log_weight = rollout_log_ratio(log_prob, rollout_log_prob, mask)
    if level == "sequence":
        log_weight = to_tokens(sequence_sum(log_weight, seq).clamp(-20, 20), seq)
    elif level == "sequence_geometric":
        log_weight = to_tokens(*sequence_means(mask, seq, log_weight), seq)
    return log_weight.exp()


def bounded(weight: Tensor, low: float | None, high: float) -> Tensor:
    """Return the weights capped at high, or, with `low`, set to 0 outside the band."""
    return weight.clamp(max=high) if low is None else torch.where((weight >= low) & (weight <= high), weight, 0.0)


# --------------------------------------------------------------------------------------------------------- what goes together


def default_aggregation(adv_estimator: str, loss_mode: str) -> str:
    """Return the aggregation of the loss's paper, or else of the advantage's; otherwise token-mean."""
    return POLICY_LOSSES[loss_mode].aggregation or ADVANTAGES[adv_estimator].aggregation or "token-mean"


def check_combination(adv_estimator: str, loss_mode: str, loss_agg_mode: str) -> None:
    """Raise ValueError, with the reason, for an unknown word or a combination that makes no sense."""
    _check_word("advantage", adv_estimator, ADVANTAGES)
    _check_word("policy loss", loss_mode, POLICY_LOSSES)
    _check_word("aggregation", loss_agg_mode, AGGREGATIONS)
    loss = POLICY_LOSSES[loss_mode]
    estimator = ADVANTAGES[adv_estimator]
    if loss.by_response and loss_agg_mode != loss.aggregation:
        raise ValueError(
            f"{loss_mode} has one ratio for a whole response, whose 1 / length comes from the aggregation {loss.aggregation}: "
            f"with {loss_agg_mode} long responses would count by their length."
        )
    if loss.one_advantage and estimator.by_token:
        raise ValueError(
            f"{loss_mode} weighs a whole response by one advantage; {adv_estimator} gives each token its own, which would be "
            "averaged away. gspo keeps them."
        )


# ------------------------------------------------------------------------------------------------------ input that is refused


# Tensors that have to be of a float type: with whole numbers, advantages would be rounded to whole numbers as well
FLOATS = {"x", "reward", "advantage", "loss", "entropy", "value", "old_value", "returns"}
FLOATS |= {"log_prob", "old_log_prob", "ref_log_prob", "rollout_log_prob", "expected_log_prob"}


def _check_tokens(caller: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all are tensors of one shape [N], those in FLOATS float, `mask` bool, and `seq` ascending. On an
    accelerator, the values of seq are not checked: that would wait for the device."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{caller}: {name} is of type {type(x).__name__}. It has to be a tensor, [N].")
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if len({*shapes.values()}) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"{caller}: found {found}. Tensors per token are packed: one shape [N] for all. losses.pack packs padded [B, T]."
        )
    for name, x in tensors.items():
        if name in FLOATS and not x.is_floating_point():
            raise ValueError(f"{caller}: {name} is {x.dtype}. It has to be a float type, such as {name}.float().")
    mask, seq = tensors.get("mask"), tensors.get("seq")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"{caller}: mask is {mask.dtype}. It has to be torch.bool, such as mask > 0.")
    if seq is None:
        return
    if seq.dtype != torch.long:
        raise ValueError(f"{caller}: seq is {seq.dtype}. It has to be torch.long: which response each token belongs to.")
    if seq.is_cpu and len(seq) and (seq[0] < 0 or (seq[1:] < seq[:-1]).any()):
        raise ValueError(f"{caller}: seq does not ascend from 0. A response's tokens lie together, and responses are in order.")


def _check_group(caller: str, seq: Tensor, group: Tensor) -> None:
    """Raise ValueError unless group is [B], one whole number a response. seq: already checked."""
    if not isinstance(group, Tensor) or group.is_floating_point():
        found = group.dtype if isinstance(group, Tensor) else f"of type {type(group).__name__}"
        raise ValueError(f"{caller}: group is {found}. It has to be a torch.long tensor, [B]: an id for each response.")
    if group.dim() != 1:
        raise ValueError(f"{caller}: group has the shape {tuple(group.shape)}. It has to be [B], one entry a response.")
    if not seq.is_cpu or not len(seq):
        return
    responses = int(seq[-1]) + 1
    if len(group) < responses:
        raise ValueError(f"{caller}: seq counts {responses} responses, group has {len(group)} entries. It has to be [B].")
    same = seq[1:] == seq[:-1]
    if len(group) == len(seq) > responses and bool((group[1:] == group[:-1])[same].all()):
        raise ValueError(
            f"{caller}: group has an entry for each of {len(seq)} tokens, seq counts {responses} responses. It has to be [B], "
            "one entry a response."
        )


def _check_responses(caller: str, responses: int, **tensors: Tensor) -> None:
    """Raise ValueError unless the tensors have their shapes of PER_RESPONSE, where B is `responses`, the length of group."""
    for name, x in tensors.items():
        shape = PER_RESPONSE[name]
        found = f"of the shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
        is_right = isinstance(x, Tensor) and x.dim() == len(shape.split(","))
        if not is_right or (shape.startswith("[B") and len(x) != responses):
            raise ValueError(f"{caller}: {name} is {found}. It has to be a tensor, {shape}; group has B = {responses} entries.")


def _check_word(what: str, word: str, choices: Iterable[str]) -> None:
    if word not in choices:
        raise ValueError(f"unknown {what} {word!r}; choose from {', '.join(choices)}")
