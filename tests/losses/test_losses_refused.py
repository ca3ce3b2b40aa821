"""losses.py refuses input whose layout would give wrong results or one of torch's own errors."""

import inspect

import pytest
import torch

import losses

SEQ = torch.tensor([0, 0, 1, 1, 2, 2])
MASK = torch.ones(6, dtype=torch.bool)
GROUP = torch.tensor([0, 0, 1])
NAMES = {name: f for name, f in (losses.ADVANTAGES | losses.POLICY_LOSSES).items() if name == f.function.__name__}


def arguments(function) -> dict[str, torch.Tensor]:
    """Valid input for any advantage or policy loss: three responses of two tokens, two prompts."""
    per_token = torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5, 1.0])
    special = {"seq": SEQ, "mask": MASK, "group": GROUP, "baseline": torch.zeros(3), "chosen": MASK}
    special |= {"parts": torch.rand(3, 2), "weights": torch.ones(2)}
    parameters = inspect.signature(function.function).parameters.values()
    names = [p.name for p in parameters if not isinstance(p.default, bool | int | float)]
    return {name: special.get(name, per_token - 1) for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_another_layout_is_refused_with_the_argument_and_its_shape(name):
    function, right = NAMES[name], arguments(NAMES[name])
    first = next(iter(right))  # reward or log_prob
    with pytest.raises(ValueError, match=rf"{name}: found .*{first} \(2, 3\).*pack"):
        function(**right | {key: x.reshape(2, 3) for key, x in right.items() if len(x) == 6})
    with pytest.raises(ValueError, match=rf"{first} \(5,\)"):
        function(**right | {first: right[first][:5]})
    with pytest.raises(ValueError, match="mask is"):
        function(**right | {"mask": MASK.float()})
    with pytest.raises(ValueError, match="seq does not ascend"):
        function(**right | {"seq": torch.tensor([1, 1, 0, 0, 2, 2])})
    with pytest.raises(ValueError, match="seq is"):
        function(**right | {"seq": SEQ.float()})


@pytest.mark.parametrize("name", [name for name in NAMES if name in losses.ADVANTAGES])
@pytest.mark.parametrize("group", [[0, 0, 0, 0, 1, 1], [7, 7, 7, 7, 7, 7], [0, 0]])
def test_a_group_that_is_not_one_entry_a_response_is_refused(name, group):
    with pytest.raises(ValueError, match=rf"{name}: .*\[B\]"):
        NAMES[name](**arguments(NAMES[name]) | {"group": torch.tensor(group)})
    with pytest.raises(ValueError, match=f"{name}: group is torch.float32"):
        NAMES[name](**arguments(NAMES[name]) | {"group": GROUP.float()})


@pytest.mark.parametrize("name", NAMES)
def test_whole_numbers_and_lists_are_refused(name):
    """Advantages of whole numbers would be rounded to whole numbers."""
    function, right = NAMES[name], arguments(NAMES[name])
    for argument in ("reward", "log_prob", "old_log_prob", "advantage"):
        if argument in right:
            for other in (torch.long, torch.bool):
                with pytest.raises(ValueError, match=rf"{name}: {argument} is {other}. It has to be a float type"):
                    function(**right | {argument: right[argument].to(other)})
    for argument in right.keys() - {"chosen"}:  # which may be None
        with pytest.raises(ValueError, match=rf"{name}: {argument} is of type list"):
            function(**right | {argument: right[argument].tolist()})


@pytest.mark.parametrize(
    ("name", "argument", "shape"),
    [("remax", "baseline", (6,)), ("gdpo", "parts", (6, 2)), ("gdpo", "parts", (3,)), ("gdpo", "weights", (3, 2))],
)
def test_what_is_per_response_has_an_entry_for_each(name, argument, shape):
    with pytest.raises(ValueError, match=rf"{name}: {argument} is of the shape \({shape[0]},.*B = 3"):
        NAMES[name](**arguments(NAMES[name]) | {argument: torch.zeros(shape)})


X = torch.zeros(6)
WORDS = {
    "aggregate": lambda word: losses.aggregate(X, MASK, SEQ, word, 2.0),
    "denominator": lambda word: losses.denominator(MASK, SEQ, word, 3),
    "kl_penalty": lambda word: losses.kl_penalty(X, X, MASK, word),
    "importance weights": lambda word: losses.rollout_is_weights(X, X, MASK, SEQ, level=word),
    "level of rejection": lambda word: losses.rollout_rejection_mask(X, X, MASK, SEQ, criteria=[(word, "k1", 0.5, 2.0)]),
    "divergence of a batch": lambda word: losses.rollout_rejection_mask(X, X, MASK, SEQ, criteria=[("batch", word, 0.0, 2.0)]),
    "divergence": lambda word: losses.rollout_rejection_mask(X, X, MASK, SEQ, criteria=[("token", word, 0.5, 2.0)]),
}


@pytest.mark.parametrize("where", WORDS)
@pytest.mark.parametrize("word", ["seq_mean_token_mean", "seq-mean", "k4", "k9", "", "TOKEN", "k3r2"])
def test_an_unknown_word_is_refused_with_the_choices(where, word):
    with pytest.raises(ValueError, match=f"{word!r}; choose from"):
        WORDS[where](word)


def test_the_rest_looks_at_its_layout_too():
    padded = torch.zeros(2, 3)
    calls = [
        lambda: losses.aggregate(padded, MASK.reshape(2, 3), SEQ.reshape(2, 3), "token-mean", 6.0),
        lambda: losses.denominator(MASK.float(), SEQ, "token-mean", 3),
        lambda: losses.kl_penalty(X, X, MASK.float(), "k3"),
        lambda: losses.importance_weight(X, X[:5], MASK),
        lambda: losses.value_loss(X, X, X, MASK.float()),
        lambda: losses.lambda_return(X, MASK, SEQ.flip(0), X),
        lambda: losses.rollout_rejection_mask(X, X, MASK, SEQ.flip(0), criteria=[("seq_max", "k1", 0.5, 2.0)]),
        lambda: losses.rollout_is_weights(X, X, MASK.float(), SEQ),
        lambda: losses.whiten(X.long(), MASK),
        lambda: losses.whiten(X, MASK[0]),
        lambda: losses.pack(torch.ones(2, 3, dtype=torch.long), padded),
        lambda: losses.pack(torch.ones(2, 3, dtype=torch.bool), X),
        lambda: losses.unpack(X, SEQ.flip(0), 3),
        lambda: losses.off_policy_tokens(X, X, X[None], MASK, SEQ, threshold=0.1),
        lambda: losses.top_covariance(X, X[0], MASK),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()


NUMBERS = {
    "divisor is 0": lambda: losses.aggregate(X, MASK, SEQ, "token-mean", 0),
    "divisor is nan": lambda: losses.aggregate(X, MASK, SEQ, "token-mean", float("nan")),
    "budget is None": lambda: losses.denominator(MASK, SEQ, "seq-mean-token-sum-norm", 3),
    "budget is 0": lambda: losses.denominator(MASK, SEQ, "seq-mean-token-sum-norm", 3, budget=0),
    "quantile is 0": lambda: losses.high_entropy_tokens(X, MASK, quantile=0),
    "quantile is 20": lambda: losses.high_entropy_tokens(X, MASK, quantile=20),
    "high is 0": lambda: losses.rollout_is_weights(X, X, MASK, SEQ, high=0),
    "low is 3": lambda: losses.rollout_is_weights(X, X, MASK, SEQ, low=3),
}


@pytest.mark.parametrize("message", NUMBERS)
def test_a_number_that_would_train_nothing_is_refused(message):
    with pytest.raises(ValueError, match=message):
        NUMBERS[message]()


RETURNED = {
    "a scalar": (lambda x: x.sum(), r"returned \[\]\."),
    "no statistics": (lambda x: -x, r"returned \[6\]\."),
    "an aggregated loss": (lambda x: (x.mean(), {}), r"returned \[\]\."),
    "a statistic that is a mean": (lambda x: (-x, {"a": x > 0, "b": x.mean()}), r"returned \[6\], \[6\], \[\]\."),
    "a statistic that is no tensor": (lambda x: (-x, {"a": 1.0}), r"returned \[6\], float\."),
    "nothing": (lambda x: None, r"returned NoneType\."),
}


@pytest.fixture
def own_losses(monkeypatch):
    """Functions that a test declares leave the tables as they were."""
    monkeypatch.setattr(losses, "POLICY_LOSSES", dict(losses.POLICY_LOSSES))
    monkeypatch.setattr(losses, "ADVANTAGES", dict(losses.ADVANTAGES))


@pytest.mark.parametrize("what", RETURNED)
def test_a_loss_that_returns_something_else_is_named(own_losses, what):
    value, found = RETURNED[what]

    @losses.policy_loss()
    def mine(log_prob, old_log_prob, advantage, mask, seq):
        return value(log_prob)

    with pytest.raises(ValueError, match=rf"mine {found} A policy loss returns \(token_loss \[n\], stats\).*n is 6"):
        losses.POLICY_LOSSES["mine"](X, X, X, MASK, SEQ)


def by_seq(log_prob, old_log_prob, advantage, mask, seq, *, chosen=None):
    """A loss whose decorator needs more."""


def knob_in_front(log_prob, old_log_prob, advantage, mask, seq, cap=1.0):
    """A knob without the `*`."""


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: losses.policy_loss(by_seq), r"by_seq: write @policy_loss\(\)"),
        (lambda: losses.advantage_estimator(by_seq), r"by_seq: write @advantage_estimator\(\)"),
        (lambda: losses.policy_loss()(by_seq), "by_seq takes `chosen`: its decorator needs chooses="),
        (lambda: losses.policy_loss(by_response=True, chooses=min)(by_seq), "by_seq is by response: .* needs aggregation="),
        (lambda: losses.policy_loss()(knob_in_front), r"knob_in_front takes \(.*cap\)\. It has to .*behind a `\*`"),
        (lambda: losses.advantage_estimator()(by_seq), r"by_seq takes .*has to take \(reward, mask, seq, group\)"),
    ],
)
def test_a_declaration_that_lacks_something_is_refused(own_losses, declare, message):
    with pytest.raises(ValueError, match=message):
        declare()
