"""Tries to cheat a reward function, before a policy does: texts without the right answer that it pays, and texts that stop it.

    python rehearse.py --reward my_reward.py:score --record runs/demo       # on the data and the responses of a run
    python rehearse.py --reward my_reward.py:score --train-files gsm8k/train.parquet
    python rehearse.py --train-files gsm8k/train.parquet --against other.py:score     # the built-in grader, and another one

The texts are made from rows of the data (tools/rehearse/attacks.py) and scored as in training. A text cheats if it scores
nearer to a right answer than to nothing. Left out: what takes more than a text, such as a tool. Exit code 1 if a text cheats.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev

import tyro

from rl.data.columns import default_source, ground_truth
from rl.data.mapped import mapped
from rl.data.tables import place, read_table, weights_of
from rl.errors import UserError
from rl.printable import one_line, printable
from rl.record.run import GROUPS
from rl.record.validations import rows_of
from rl.rewards.args import RewardArgs
from rl.rewards.pool import Score, ScoringPool
from rl.samples.recorder import Record
from tools.rehearse.attacks import BREAKER, HONEST, Text, breakers, texts

Job = tuple[str, Text, dict]  # (place of the row, text to score, row)
SECONDS = 2.0  # that a text may take: shorter than in training, since some are made to hang


@dataclass
class Args:
    reward: str | None = None
    """Reward function, as file.py:function; by default the built-in grader of each row's data_source."""
    record: Path | None = None
    """Directory of a run: its data is used, and its recorded responses show what a text would be worth among them."""
    train_files: tuple[str, ...] = ()
    """Data, as the flag of the training scripts; by default that of --record, or the demo's."""
    map: str | None = None
    """Function of a row, as the flag of the training scripts; by default that of --record."""
    prompt_key: str = "prompt"
    """Column that holds the prompt."""
    against: str | None = None
    """Another reward function: its disagreements are listed."""
    rows: int = 8
    """Rows of the data to try, spread over it."""


@dataclass
class Found:
    """A text of one name, over the rows."""

    kind: str
    scores: list[float] = field(default_factory=list)
    cheats: list[tuple[float, str, str]] = field(default_factory=list)  # (score, place of the row, text)
    errors: list[str] = field(default_factory=list)


def main(args: Args) -> int:
    files = args.train_files or ("demo",)
    if args.record and not args.train_files:
        recorded = Record(args.record).starts[-1]["flags"]
        files = recorded["train_files"]
        args.map = args.map or recorded.get("map")
    rows = [*read_rows(files, args.rows, args.map)]
    jobs = [
        (where, text, row) for where, row in rows for text in texts(asked(row, args.prompt_key), str(ground_truth(row)).strip())
    ]
    jobs += [(rows[0][0], text, rows[0][1]) for text in breakers()]
    print(f"{len(jobs):,} texts for {len(rows)} rows of {', '.join(files)}", flush=True)
    scores = score(args.reward, jobs, args.prompt_key)
    found = judge(jobs, scores)
    show(found)
    best = max((cheat[0] for of in found.values() for cheat in of.cheats), default=None)
    if args.record and best is not None:
        compare_with_record(args.record, best)
    if args.against:
        theirs = score(args.against, jobs, args.prompt_key)
        differ = [(job, a, b) for job, a, b in zip(jobs, scores, theirs, strict=True) if a.score != b.score]
        print(f"{len(differ):,} of {len(jobs):,} texts have another score by --against")
        for (where, text, _), a, b in differ[:20]:
            print(f"  {text.name}, {where}: {a.score} and {b.score}: {shown(text.text)}")
    return int(best is not None)


def read_rows(files: Sequence[str], count: int, spec: str | None = None) -> Iterator[tuple[str, dict]]:
    """Yield (place, row) of rows spread over the files. spec: of --map."""
    files, _ = weights_of(files)
    for file in files:
        table = read_table(file, "train")
        table = mapped(table, file, spec) if spec else table
        most = min(len(table), -(-count // len(files)))
        for number in (i * len(table) // most for i in range(most)):
            yield place(file, table, number), table[number]


def asked(row: dict, prompt_key: str) -> str:
    """Return a row's prompt as text: the last message of a chat."""
    prompt = row.get(prompt_key, row.get("question")) or ""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def score(reward: str | None, jobs: Sequence[Job], prompt_key: str) -> list[Score]:
    """Score the texts as training does."""
    found: dict[int, Score] = {}
    with ScoringPool(RewardArgs(reward=reward, reward_timeout=SECONDS, reward_workers=2, outage_timeout=0)) as pool:
        for number, (_, text, row) in enumerate(jobs):
            source = row.get("data_source") or default_source(row)
            pool.submit(number, source, text.text, ground_truth(row), row.get("extra_info"), prompt=row.get(prompt_key))
        while pool.pending:
            found |= pool.wait(1.0)
    return [found[number] for number in range(len(jobs))]


def judge(jobs: Sequence[Job], scores: Sequence[Score]) -> dict[str, Found]:
    """Return name -> what its texts scored, and which of them cheat: those that score nearer to the best right answer of their
    row than to an empty one; if right answers are not worth more than that, those that score more than both."""
    found = {text.name: Found(text.kind) for _, text, _ in jobs}
    scored: dict[str, list[tuple[Text, float]]] = {}
    for (where, text, _), its in zip(jobs, scores, strict=True):
        if its.score is None:
            found[text.name].errors.append(its.error or "")
        else:
            found[text.name].scores.append(its.score)
            scored.setdefault(where, []).append((text, its.score))
    for where, of_row in scored.items():
        low = next((its for text, its in of_row if text.name == "nothing"), 0.0)
        high = max((its for text, its in of_row if text.kind == HONEST), default=low)
        bound = (low + high) / 2 if high > low else high
        for text, its in of_row:
            if text.kind != HONEST and its > bound:
                found[text.name].cheats.append((its, where, text.text))
    return found


def show(found: dict[str, Found]) -> None:
    """Print the texts that cheat, and those that could not be scored."""
    honest = [score for of in found.values() if of.kind == HONEST for score in of.scores]
    print(f"right answers score up to {max(honest):g}" if honest else "no right answer could be scored")
    for name, of in sorted(found.items(), key=lambda item: -len(item[1].cheats)):
        if of.cheats:
            highest, where, text = max(of.cheats)
            print(f"CHEATS   {name}, in {len(of.cheats)} rows, up to {highest:g}: {shown(text)} ({where})")
    cheats = [cheat for of in found.values() for cheat in of.cheats]
    if cheats:
        its, where, text = min(cheats, key=lambda cheat: len(cheat[2]))
        print(f"The shortest text that is paid scores {its:g}: {shown(text)} ({where})")
    else:
        print("no text cheats")
    for name, of in found.items():
        if of.errors:
            print(f"{'STOPS IT' if of.kind == BREAKER else 'unscored'} {name}: {shown(of.errors[0], 160)}")


def shown(text: str, most: int = 60) -> str:
    line = printable(one_line(text))
    return line if len(line) <= most else f"{line[:most]}..."


def compare_with_record(run: Path, best: float) -> None:
    """Print the advantage that a text of this score would have among the recorded responses."""
    groups = [group["scores"] for row in rows_of(run / GROUPS) for group in row["groups"]]
    scored = [[score for score in scores if score is not None] for scores in groups]
    with_it = [[*scores, best] for scores in scored if scores]
    mean = fmean((best - fmean(scores)) / (pstdev(scores) or 1.0) for scores in with_it)
    print(f"As one more response in each of {len(with_it):,} recorded groups, it would have an advantage of {mean:.2f} (GRPO).")


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(1)
