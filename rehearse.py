"""Tries to cheat a reward function or an environment, before a policy does: texts without the right answer that it pays, and
texts that stop it.

    python rehearse.py --reward my_reward.py:score --record runs/demo       # on prompts and responses of a run
    python rehearse.py --reward my_reward.py:score --train-files gsm8k/train.parquet
    python rehearse.py --train-files gsm8k/train.parquet --against other.py:score     # the built-in grader, and another one
    python rehearse.py --env my_game.py:Game --record runs/demo             # each text as the model's turns in it; or --tools

The texts are made from rows of the data (tools/rehearse/attacks.py) and scored as in training. A text cheats if it scores at
least half way from nothing to a right answer. Left out: calls of tools that a policy may invent. Exit code 1 if a text cheats.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal, NamedTuple

import tyro

from rl.data.files import read_table, weights_of
from rl.data.mapped import mapped
from rl.data.tables import ground_truth, place, source_of
from rl.environments import named
from rl.environments.args import EnvironmentArgs
from rl.errors import UserError
from rl.generation.engine import request_seed
from rl.generation.episodes import OF_GROUP
from rl.printable import one_line
from rl.ranks import process
from rl.rewards.args import RewardArgs
from rl.rewards.pool import ScoringPool, can_score
from rl.rewards.score import Score
from rl.samples.group import Response
from tools.rehearse import episode
from tools.rehearse.attacks import BREAKERS, attacks, right_answers
from tools.view.rows import Samples, parts_of

HONEST, ATTACK, BREAKER = "right", "attack", "breaker"
SECONDS = 2.0  # that a text may take: shorter than in training, since some are made to hang
SHOWN = 10  # texts with two scores
PLAY = f"{episode.__file__}:play"


class Try(NamedTuple):
    """A text to score, for a row of the data."""

    where: str
    row: dict
    kind: str
    name: str
    text: str
    said: dict | None = None  # of a recorded episode: `turns`, `seed` and `own_seed`; otherwise each turn is the text


@dataclass
class Args:
    reward: str | None = None
    """Reward function, as file.py:function; by default the built-in grader of each row's data_source."""
    record: Path | None = None
    """Directory of a run: its newest recorded step has the prompts to use, and responses that are scored, too."""
    train_files: tuple[str, ...] = ("demo",)
    """Data, as the flag of the training scripts; --record has its own."""
    map: str | None = None
    """Function of a row, as the flag of the training scripts; --record has its own."""
    prompt_key: str = "prompt"
    """Column that holds the prompt."""
    against: str | None = None
    """Another reward function: its disagreements are listed."""
    env: str | None = None
    """Environment, as the flag of the training scripts; --reward may then name functions in TRL's form. An agent cannot be
    tried: what it does between its calls is its own. Give --reward alone, for its last answers."""
    tools: str | None = None
    """Tools, as the flag of the training scripts."""
    tool_format: Literal["hermes", "llama", "xml"] = "hermes"
    """How recorded turns have calls."""
    max_turns: int = 8
    """Turns of an episode, at most."""
    rows: int = 8
    """Rows of the data to try, spread over it."""


def main(args: Args) -> int:
    samples = Samples(args.record) if args.record else None
    recorded = []
    if samples:
        flags = samples.record.starts[-1]["flags"]
        recorded = [*samples.responses(samples.record.steps[-1:])]
        args.train_files = tuple(dict.fromkeys(row["where"].rpartition(" row ")[0] for row, _ in recorded))
        args.map = flags.get("map")
    rows = dict(read_rows(args, {row["where"] for row, _ in recorded}))
    used = [*rows.items()][: args.rows]
    texts = [text for where, row in used for text in texts_of(where, row)]
    texts += [Try(*used[0], BREAKER, name, text) for name, text in BREAKERS.items()]
    print(f"{len(texts):,} texts for {len(used)} rows of {', '.join(args.train_files)}", flush=True)
    scores = score(args, args.reward, texts)
    found = cheats(texts, scores)
    show(texts, scores, found)
    if args.against:
        compare("texts: another score by --against", texts, scores, score(args, args.against, texts))
    if recorded:
        said = [said_again(samples, row, rows[row["where"]], response, flags["seed"]) for row, response in recorded]
        theirs = [Score(row["score"]) for row, _ in recorded]
        compare("recorded responses: another score in the run", said, score(args, args.reward, said), theirs)
    if recorded and found:
        show_advantage(samples, max(its for its, _ in found))
    return int(len(found) > 0)


def said_again(samples: Samples, about: dict, row: dict, response: Response, seed: int) -> Try:
    """Return a recorded response. seed: of the run."""
    end = samples.tokenizer.eos_token
    turns = [samples.text(response.token_ids[its]).removesuffix(end) for who, its in parts_of(response) if who == "policy"]
    of_group, own = (request_seed(seed, about["ticket"], number) for number in (OF_GROUP, about["number"]))
    said = {"turns": turns, "times": 1, "seed": of_group, "own_seed": own}
    return Try(about["where"], row, "", "recorded", samples.answer(response), said)


def read_rows(args: Args, wanted: Collection[str]) -> Iterator[tuple[str, dict]]:
    """Yield (place, row): the rows with the wanted places, or else some that are spread over the files."""
    files, _ = weights_of(args.train_files)
    for file in files:
        table = read_table(file, "train")
        table = mapped(table, file, args.map) if args.map else table
        most = min(len(table), -(-args.rows // len(files)))
        numbers = range(len(table)) if wanted else [i * len(table) // most for i in range(most)]
        for where, number in ((place(file, table, number), number) for number in numbers):
            if not wanted or where in wanted:
                row = table[number]
                asked = [{"role": "user", "content": row.get("question") or ""}]
                yield where, row | {"prompt": row.get(args.prompt_key) or asked}


def texts_of(where: str, row: dict) -> Iterator[Try]:
    """Yield right answers and attacks for a row. Of a chat, the last message is the prompt."""
    prompt = row["prompt"] if isinstance(row["prompt"], str) else str(row["prompt"][-1]["content"])
    truth = str(ground_truth(row)).strip()
    for kind, texts in ((HONEST, right_answers(truth)), (ATTACK, attacks(prompt, truth))):
        yield from (Try(where, row, kind, name, text) for name, text in texts.items())


def score(args: Args, reward: str | None, texts: Sequence[Try]) -> list[Score]:
    """Score the texts as training does: by the environment if there is one, and by the reward function if that does not."""
    found: dict[int, Score] = {}
    programs = [*named.programs(EnvironmentArgs(env=args.env, tools=args.tools)).values()]
    if len(programs) > 1:
        raise UserError("--env and --tools: texts go to one of them. Leave the other out.")
    of_episodes = reward if RewardArgs(reward=reward).scores_environments else ""
    limits = {"reward_timeout": SECONDS, "reward_workers": 2, "outage_timeout": 0}
    with ScoringPool(RewardArgs(reward=PLAY if programs else reward, **limits)) as pool:
        for number, (_, row, _, _, text, said) in enumerate(texts):
            known = {"data_source": source_of(row), "ground_truth": ground_truth(row)}
            extra = row.get("extra_info")
            if programs:
                said = said or {"turns": [text], "times": args.max_turns, "seed": 0, "own_seed": 0}
                program = (*programs[0], args.tool_format, of_episodes)
                extra = said | {"row": row | known | {"extra_info": extra}, "program": program}
            pool.submit(number, **known, text="" if programs else text, extra_info=extra, prompt=row["prompt"])
        while pool.pending:
            found |= pool.wait(1.0)
    left = [number for number, its in found.items() if its.extra.get(episode.UNSCORED)]
    left = [number for number in left if can_score(source_of(texts[number].row), RewardArgs(reward=reward))]
    if left:
        by_grader = replace(args, env=None, tools=None)
        found |= zip(left, score(by_grader, reward, [texts[number] for number in left]), strict=True)
    return [found[number] for number in range(len(texts))]


def cheats(texts: Sequence[Try], scores: Sequence[Score]) -> list[tuple[float, Try]]:
    """Return (score, text) of those that score at least half way from an empty answer to the best right one of their row; if
    right answers are not worth more than that, of those that score more."""
    of_rows = defaultdict(list)
    for text, its in zip(texts, scores, strict=True):
        if its.score is not None:
            of_rows[text.where].append((its.score, text))
    found = []
    for of_row in of_rows.values():
        low = next((its for its, text in of_row if text.name == "nothing"), 0.0)
        high = max((its for its, text in of_row if text.kind == HONEST), default=low)
        middle = (low + high) / 2
        found += [(its, text) for its, text in of_row if text.kind != HONEST and (its >= middle if high > low else its > high)]
    return found


def show(texts: Sequence[Try], scores: Sequence[Score], found: Sequence[tuple[float, Try]]) -> None:
    """Print the texts that cheat, and those that could not be scored."""
    honest = [its.score for text, its in zip(texts, scores, strict=True) if text.kind == HONEST and its.score is not None]
    print(f"right answers score up to {max(honest):g}" if honest else "no right answer could be scored")
    for name, count in Counter(text.name for _, text in found).most_common():
        its, text = max(((its, text) for its, text in found if text.name == name), key=lambda cheat: cheat[0])
        print(f"CHEATS   {name}, in {count} rows, up to {its:g}: {shown(text.text)} ({text.where})")
    if found:
        its, text = min(found, key=lambda cheat: len(cheat[1].text))
        print(f"The shortest text that is paid scores {its:g}: {shown(text.text)} ({text.where})")
    else:
        print("no text cheats")
    errors = {text.name: (text.kind, its.error) for text, its in zip(texts, scores, strict=True) if its.error}
    for name, (kind, error) in errors.items():
        print(f"{'STOPS IT' if kind == BREAKER else 'unscored'} {name}: {shown(error, 160)}")


def shown(text: str, most: int = 60) -> str:
    return one_line(text[:most]) + "..." * (len(text) > most)


def compare(what: str, texts: Sequence[Try], scores: Sequence[Score], others: Sequence[Score]) -> None:
    """Print how many of the texts have another score, and some of them."""
    pairs = zip(texts, scores, others, strict=True)
    differ = [(text, a.score, b.score) for text, a, b in pairs if a.score != b.score]
    print(f"{len(differ):,} of {len(texts):,} {what}")
    for text, a, b in differ[:SHOWN]:
        print(f"  {text.name}, {text.where}: {a} and {b}: {shown(text.text)}")


def show_advantage(samples: Samples, best: float) -> None:
    """Print the advantage that a text of this score would have among the recorded responses."""
    groups = [group["scores"] for groups in samples.visits.values() for group in groups]
    known = [[score for score in scores if score is not None] for scores in groups]
    with_it = [[*scores, best] for scores in known if scores]
    mean = fmean((best - fmean(scores)) / (pstdev(scores) or 1.0) for scores in with_it)
    print(f"As one more response in each of {len(with_it):,} recorded groups, it would have an advantage of {mean:.2f} (GRPO).")


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except UserError as error:
        process.fail(error)
