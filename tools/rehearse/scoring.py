"""Scores texts as training does: by a reward function or a built-in grader, or by an environment that is told them."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

from rl.data.columns import default_source, ground_truth
from rl.environments.args import EnvironmentArgs
from rl.rewards.args import RewardArgs
from rl.rewards.pool import Score, ScoringPool, can_score

SECONDS = 2.0  # that a text may take: shorter than in training, since some are made to hang
AT_ONCE = 16  # episodes
LONGEST = 16_384  # tokens of a turn: no policy says more


class Try(NamedTuple):
    """A text to score, for a row of the data."""

    where: str
    row: dict
    kind: str
    name: str
    text: str
    turns: tuple[list[int], ...] = ()  # tokens that an environment is told; without any, the text whenever it is its turn
    seeds: tuple[int, int] = (0, 0)  # of the environment's group, and its own

    @property
    def known(self) -> dict:
        """What graders and environments know of the row."""
        source = self.row.get("data_source") or default_source(self.row)
        return {"data_source": source, "ground_truth": ground_truth(self.row), "extra_info": self.row.get("extra_info")}


class Policy(NamedTuple):
    """Whose turns an environment is told."""

    tokenizer: Any
    path: str
    ends: set[int]  # tokens

    def turn(self, text: str) -> list[int]:
        ids = self.tokenizer(text.encode(errors="replace").decode(), add_special_tokens=False)["input_ids"]
        return [*ids[:LONGEST], min(self.ends)]


def score(
    texts: Sequence[Try], reward: str | None, env: EnvironmentArgs | None = None, policy: Policy | None = None
) -> list[Score]:
    """Return the texts' scores. reward: the user's function, by default the built-in graders; policy: for an environment."""
    args = RewardArgs(reward=reward, reward_timeout=SECONDS, reward_workers=2, outage_timeout=0)
    found = play(texts, args, env, policy) if env else {}
    with ScoringPool(args) as pool:
        for number, text in enumerate(texts):
            if number not in found:
                pool.submit(number, text=text.text, prompt=text.row.get("prompt"), **text.known)
        while pool.pending:
            found |= pool.wait(1.0)
    return [found[number] for number in range(len(texts))]


def play(texts: Sequence[Try], reward: RewardArgs, env: EnvironmentArgs, policy: Policy) -> dict[int, Score]:
    """Tell an environment each text. Return the scores, by place in `texts`, except those that the grader has to give."""
    from rl.environments.pool import Environments  # late: graders alone need none

    found: dict[int, Score] = {}
    rest = [*enumerate(texts)][::-1]
    turns: dict[int, list[list[int]]] = {}  # of the episodes under way: those to come, the next one last
    rewards: dict[int, list[float]] = {}
    more = {"reward": reward.reward} if reward.scores_environments else {}
    with closing(Environments(env, policy.path, policy.ends, chat_template=policy.tokenizer.chat_template, **more)) as episodes:
        while rest or turns:
            while rest and len(turns) < AT_ONCE:
                number, text = rest.pop()
                turns[number] = [*text.turns[::-1]] or [policy.turn(text.text)] * env.max_turns
                rewards[number] = []
                episodes.begin(number, text.row | text.known, *text.seeds)
            for number, answer in episodes.poll(1.0):
                text = texts[number]
                is_whole, is_over = answer.get("done"), answer.get("asked") == "end" or "event" in answer
                if answer.get("reward") is not None:
                    rewards[number].append(answer["reward"])
                if turns[number] and not (is_whole or is_over):
                    episodes.ask(number, "step", ids=turns[number].pop(), ended=True)
                    continue
                if episodes.scores_at_end[env.name_of(text.row)] and not (rewards[number] or is_whole or is_over):
                    episodes.ask(number, "end", ids=[])
                    continue
                if "event" in answer:
                    found[number] = Score(None, event=answer["event"], message=answer["message"])
                elif rewards[number]:
                    found[number] = Score(sum(rewards[number]))
                elif not can_score(text.known["data_source"], reward):
                    nothing = Score(None, event="bad_value", message="neither the environment nor a grader scored it")
                    found[number] = nothing if is_whole else Score(0.0)  # cut before its end
                del turns[number]
                episodes.end(number)
    return found
