"""Text that repeats itself or copies its prompt, whether it pays, and the warnings when it begins to."""

import dataclasses
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import make_group
from test_health import Record

import train_sync
from rl.algorithm.health import WINDOW, Health, text_metrics
from rl.samples.group import Group, Response


def response(text: str, score: float | None = 0.0, mask: str | None = None) -> Response:
    """A response with a token for each letter. mask: a letter "x" where the policy sampled it."""
    n = len(text)
    ids = np.array([ord(letter) for letter in text], np.int32)
    mask = None if mask is None else np.array([letter == "x" for letter in mask])
    return Response(ids, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop", score, mask=mask)


def group(prompt: str, *responses: Response) -> Group:
    return Group(0, np.array([ord(letter) for letter in prompt], np.int32), "d", list(responses))


PROMPT = "How much is 12 plus 34?"


def test_random_texts_are_as_a_count_by_strings_says(ranks):
    letters = random.Random(0)
    text = lambda: "".join(letters.choices("abc", k=letters.randrange(1, 60)))  # noqa: E731
    for _ in range(30):
        prompt, texts = text(), [text() for _ in range(5)]
        found = text_metrics([group(prompt, *map(response, texts))], ranks)
        repeated, copied = [], []
        for one in texts:
            fours = [one[i : i + 4] for i in range(len(one) - 3)]
            repeated.append(sum(four in fours[:i] for i, four in enumerate(fours)) / len(fours) if fours else 0)
            eights = [one[i : i + 8] for i in range(len(one) - 7)]
            copied.append(sum(eight in prompt for eight in eights) / len(eights) if eights else 0)
        assert found["text/repeated/mean"] == pytest.approx(sum(repeated) / 5)
        assert found["text/copied/mean"] == pytest.approx(sum(copied) / 5)
        assert found["text/distinct"] == len({*texts}) / 5


def test_it_shows_whether_repeating_pays(ranks):
    """By the group's own mean: the second group scores more as a whole."""
    pays = group(PROMPT, response("a" * 20, 1.0), response("abcdefgh", 0.0), response("zyxwvuts", 0.0))
    not_scored = response("b" * 20, None)
    other = group(PROMPT, response("mnopqrst", 5.0), response("c" * 20, 6.0), not_scored)
    found = text_metrics([pays, other], ranks)
    assert found["text/repeated/better"] == pytest.approx(16 / 17) and found["text/repeated/worse"] == 0
    assert math.isnan(text_metrics([group(PROMPT, response("a", 1.0))], ranks)["text/copied/better"]), "no score differs"


@pytest.mark.parametrize("learners", [2, 3, 5])
def test_learners_share_the_work(ranks, monkeypatch, learners):
    """The numbers do not depend on how many there are, to the bit."""
    groups = [make_group(ticket, [30, 40, 50]) for ticket in range(7)]
    expected = text_metrics(groups, ranks)
    parts = []
    monkeypatch.setattr("rl.algorithm.health.dist.all_gather_values", lambda own: parts.append(own) or parts)
    for rank in range(learners):
        found = text_metrics(groups, dataclasses.replace(ranks, rank=rank, world_size=learners))
    assert found == expected


@pytest.fixture
def health():
    return Health(train_sync.Args(), SimpleNamespace(), Record(), skipped=0)


def step(share: str, mean: float, better: float, worse: float, score: float) -> dict[str, float]:
    shares = {f"text/{name}/{which}": 0.0 for name in ("repeated", "copied") for which in ("mean", "better", "worse")}
    its = {f"text/{share}/mean": mean, f"text/{share}/better": better, f"text/{share}/worse": worse}
    return shares | its | {"critic/score/mean": score}


@pytest.mark.parametrize("share", ["repeated", "copied"])
@pytest.mark.parametrize(
    ("last", "warns"),
    [
        ((0.3, 0.35, 0.2, 0.8), True),
        ((0.3, 0.2, 0.35, 0.8), False),  # it does not pay
        ((0.3, 0.35, 0.2, 0.4), False),  # the score has not risen
        ((0.1, 0.35, 0.2, 0.8), False),  # it is as frequent as before
        ((0.3, math.nan, 0.2, 0.8), False),
    ],
)
def test_a_warning_if_it_becomes_frequent_and_pays(health, share, last, warns):
    for number in range(WINDOW):
        health._warn_of_texts(number, step(share, 0.05, 0.05, 0.05, 0.5))
    for number in range(WINDOW, 2 * WINDOW):
        assert not health.record.said
        health._warn_of_texts(number, step(share, *last))
    said = health.record.said
    assert bool(said) == warns and health.counts[f"more_{share}"] == warns
    if warns:
        assert said[0][0] == f"steps in which {share} text has become frequent and scores well"
        assert "was 0.05 in the first 20 steps, and 0.30" in said[0][2]


@pytest.mark.parametrize(
    ("accuracies", "scores", "warns"),
    [
        ((0.8, 0.6, 0.4), (0.1, 0.2), True),
        ((0.8, 0.6, 0.4), (0.2, 0.1), False),  # training falls as well
        ((0.8, 0.4, 0.6), (0.1, 0.2), False),  # it has recovered
        ((0.5, 0.49, 0.48), (0.1, 0.2), False),  # that may be chance
    ],
)
def test_a_warning_if_validation_falls_while_training_rises(health, accuracies, scores, warns):
    """Of one source; the other one's validation rises."""
    for number, accuracy in enumerate(accuracies):
        if number:
            score = {"d": scores[number - 1], "other": 0.0}
            health._scores += [(10 * number - 9, score), (10 * number, score)]
        rows = [{"data_source": "d", "acc": float(i < 100 * accuracy)} for i in range(100)]
        rows += [{"data_source": "other", "acc": float(i < number)} for i in range(100)]
        health.of_validation(10 * number, [*rows, {"data_source": "d", "acc": None}])
    assert len(health.record.said) == warns == health.counts["validation_falls"]
    if warns:
        detail = health.record.said[0][2]
        assert detail.startswith("d: 0.800, 0.600, 0.400 after steps 0, 10 and 20") and "from 0.100 to 0.200" in detail
