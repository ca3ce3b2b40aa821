"""Why a step has no signal: nothing in it has an advantage. Only imported by a run in which that happens."""

from collections import Counter

from rl.algorithm.metrics import OF_REJECTION, Fates
from rl.learning.batch import Batch

REJECTED, UNSCORED, MASKED, TRUNCATED, EQUAL, OTHER = "rejected", "unscored", "masked", "truncated", "equal_scores", "other"
# Cause: a word, a sentence, the remedy
CAUSES = {
    REJECTED: (
        ": rejection",
        "scores differ, but --rollout-rs or --rollout-is-threshold left out the responses that do",
        OF_REJECTION,
    ),
    UNSCORED: (
        ": not scored",
        "too few responses could be scored",
        "Correct the reward function, or what it needs: the warning of responses that could not be scored has its last error",
    ),
    MASKED: (
        ": nothing sampled",
        "the policy sampled a token of one response at most",
        "Find out why environments end before the policy's first token",
    ),
    TRUNCATED: (
        ": cut off",
        "every response ran into --max-response-length, and all score the same",
        "Raise --max-response-length, or check that the model's end token is the one that its answers end with",
    ),
    EQUAL: (": equal scores", "all scores are equal", "Prompts may be too easy or too hard, or the reward broken"),
    OTHER: ("", "scores differ, but --adv-estimator makes every advantage 0", "Take another one"),
}


def diagnose(args, batch: Batch, fates: Fates) -> tuple[str, str, str]:
    """Return the step's cause, a word for it, and sentences about it. If a group's scores differ, the cause of its missing
    signal is the step's cause, because equal scores in other groups are no fault. Otherwise it is the most frequent cause."""
    found = causes(args, batch, fates).most_common()
    found.sort(key=lambda item: (item[0] != REJECTED, item[0] != OTHER))
    grouped = args.loss.estimator.group_of_one or args.loss.needs_greedy
    parts = [(f"{count} of {len(batch.sizes)} groups: " if grouped else "") + CAUSES[cause][1] for cause, count in found]
    chief = found[0][0]
    word, _, remedy = CAUSES[chief]
    return chief, word, f"{'; '.join(parts)}. {remedy}."


def causes(args, batch: Batch, fates: Fates) -> Counter[str]:
    """Return why nothing is learnt in a step without any signal: cause -> number of groups (without a group-wise estimator, the
    whole batch is one group). A group counts once, under the first cause that applies: scores differ, but responses were
    rejected; most could not be scored; they are masked as a whole; all reached the length limit; the scores are equal. OTHER:
    the scores differ, none was rejected, and the estimator gives no advantage."""
    estimator = args.loss.estimator
    members: dict[int, list[int]] = {place: [] for place in range(len(batch.sizes))}
    for response, place in enumerate(batch.group.tolist()):
        members[place].append(response)
    sizes = dict(enumerate(batch.sizes))
    if estimator.group_of_one is None and "baseline" not in estimator.inputs:
        members = {0: [*range(len(batch.group))]}
        sizes = {0: sum(sizes.values())}
    scores = batch.score.tolist()
    baselines = batch.baseline.tolist()
    truncated, rejected, masked = (x.tolist() for x in (batch.truncated, fates.rejected, fates.masked))
    found: Counter[str] = Counter()
    for place, responses in members.items():
        compared = [i for i in responses if not masked[i]]
        differ = len({scores[i] for i in compared}) > 1
        if "baseline" in estimator.inputs:
            differ = any(scores[i] != baselines[i] for i in compared)
        if differ:
            found[REJECTED if any(rejected[i] for i in compared) else OTHER] += 1
        elif sizes[place] - len(responses) > len(responses) or (len(responses) < 2 <= sizes[place]):
            found[UNSCORED] += 1
        elif len(compared) < min(2, len(responses)):
            found[MASKED] += 1
        else:
            found[TRUNCATED if all(truncated[i] for i in responses) else EQUAL] += 1
    return found
