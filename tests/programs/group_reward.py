"""Started by test_forking.py with the fork group_reward: prints the scores of groups of four, one for each ground truth, and of
a validation.

python group_reward.py REWARD GROUP_REWARD GROUND_TRUTH...
"""

import json
import sys
from types import SimpleNamespace

from rl.generation.engine import Output
from rl.generation.generator import Key, OpenGroup
from rl.rewards.args import RewardArgs
from rl.rewards.pool import ScoringPool

TEXTS = ["aaa", "a", "aaaa", "aa"]


class Stub:
    """The parts of a generator that are asked for texts. A response's only token is its number."""

    def __init__(self, groups: dict):
        self.working = groups
        self.responses = SimpleNamespace(last_turn=lambda output: output.token_ids)
        self.job = SimpleNamespace(tokenizer=self, total_steps=9)
        self.args = SimpleNamespace(schedule=SimpleNamespace(step_of=lambda version, total: version))

    def decode(self, tokens: list[int], **_) -> str:
        return TEXTS[tokens[0]]


def main(reward: str, group_reward: str, *cases: str) -> None:
    groups = {}
    for number, case in enumerate((*cases, "validation")):
        prompt = SimpleNamespace(data_source="x", ground_truth=case, extra_info=None, row={}, text="ask")
        key = Key(case == "validation", number)
        outputs = {i: Output((key, i), [i], [0.0], [3], "stop") for i in range(4)}
        groups[key] = OpenGroup(prompt, 4, outputs=outputs)
    with ScoringPool(RewardArgs(reward=reward, group_reward=group_reward)) as pool:
        for key, group in groups.items():
            for i, text in enumerate(TEXTS):
                pool.submit((key, i), "x", text, group.prompt.ground_truth)
        while pool.pending:
            for (key, i), score in pool.groups.final(pool.wait(1.0), Stub(groups)):
                assert i not in groups[key].scores
                groups[key].scores[i] = score
    print(json.dumps({g.prompt.ground_truth: [vars(g.scores[i]) for i in range(4)] for g in groups.values()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
