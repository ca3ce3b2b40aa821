"""Numbers about the text of responses: whether a policy repeats itself or copies its prompt, and whether that pays.

    text/distinct             responses to a prompt that differ, divided by the number of responses
    text/repeated/mean        share of a response's sequences of 4 tokens that it has written before
    text/copied/mean          share of a response's sequences of 8 tokens that are in its prompt
    text/<...>/better         the mean over the responses that score above their group's mean
    text/<...>/worse          ... and below it

Only tokens that the policy sampled count. Left out: the texts themselves (view.py).
"""

import math
from collections.abc import Iterable, Sequence

from rl.ranks import dist
from rl.samples.group import Group, Response

REPEATED, COPIED = 4, 8  # tokens of a sequence
SHARES = ("repeated", "copied")


def text_metrics(groups: Sequence[Group], ranks: dist.Ranks) -> dict[str, float]:
    """Return text/*; NaN where there are no such responses. Each learner looks at a part of the groups. A collective."""
    own = [_look_at(group) for group in groups[ranks.rank :: ranks.world_size]]
    looked = [of_group for part in dist.all_gather_values(own) for of_group in part]
    out = {"text/distinct": mean(distinct for distinct, _ in looked)}
    responses = [response for _, of_group in looked for response in of_group]
    for place, name in enumerate(SHARES):
        out[f"text/{name}/mean"] = mean(shares[place] for _, shares in responses)
        out[f"text/{name}/better"] = mean(shares[place] for change, shares in responses if change > 0)
        out[f"text/{name}/worse"] = mean(shares[place] for change, shares in responses if change < 0)
    return out


def _look_at(group: Group) -> tuple[float, list[tuple[float, list[float]]]]:
    """Return the share of distinct responses, and of each scored response its score less the mean, and its SHARES."""
    scored = [response for response in group.scored if response.sampled]
    if not scored:
        return math.nan, []
    middle = sum(response.score for response in scored) / len(scored)
    found = [(response.score - middle, own) for response, own in zip(scored, shares(group, scored), strict=True)]
    return len({tuple(_sampled(response)) for response in scored}) / len(scored), found


def shares(group: Group, responses: Sequence[Response]) -> list[list[float]]:
    """Return the SHARES of responses of the group."""
    prompt = {*_sequences(group.prompt_ids.tolist(), COPIED)}
    return [[_repeated(text), _copied(text, prompt)] for text in map(_sampled, responses)]


def _sampled(response: Response) -> list[int]:
    tokens = response.token_ids if response.mask is None else response.token_ids[response.mask]
    return tokens.tolist()


def _repeated(tokens: list[int]) -> float:
    sequences = _sequences(tokens, REPEATED)
    return 1 - len({*sequences}) / len(sequences) if sequences else 0.0


def _copied(tokens: list[int], prompt: set[tuple[int, ...]]) -> float:
    sequences = _sequences(tokens, COPIED)
    return sum(sequence in prompt for sequence in sequences) / len(sequences) if sequences else 0.0


def _sequences(tokens: list[int], n: int) -> list[tuple[int, ...]]:
    return [*zip(*(tokens[place:] for place in range(n)), strict=False)]


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
