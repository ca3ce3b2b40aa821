"""What the page asks, and its answers: a question is a path, such as step?run=0&step=12, an answer is a value for JSON. The
server and the file for a colleague (--html) give the same answers."""

import re
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rl.errors import UserError
from rl.samples.group import Group
from tools.view import explanations, learner, texts
from tools.view.rows import Samples, mean, parts_of, sampled

CURVES = (
    "critic/score/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "actor/grad_norm",
    "training/rollout_probs_diff_mean",
    "text/repeated/mean",
    "text/copied/mean",
    "text/distinct",
    "staleness/mean",
    "reward/unscored",
)
BEGINNING = 160  # characters of a prompt in a list
READ = 2000  # responses of the first and of the last steps, at most, whose phrases are counted


class Answers:
    """The answers about some runs."""

    def __init__(self, runs: Iterable[Path]):
        self.runs = [Samples(run) for run in runs]

    def __call__(self, path: str) -> object:
        """Return the answer of a path. Raise UserError if there is none."""
        name, _, query = path.partition("?")
        try:
            given = {key: value if key == "text" else int(value) for key, value in urllib.parse.parse_qsl(query)}
            if name == "runs":
                return [about(samples) for samples in self.runs]
            return QUESTIONS[name](self.runs[given.pop("run")], **given)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"no answer to {path}: {error!r}") from error

    def paths(self, steps: range) -> Iterator[str]:
        """Yield every path that the page may ask of these steps."""
        yield "runs?"
        for run, samples in enumerate(self.runs):
            visited = {step: groups for step, groups in samples.visits.items() if step in steps}
            recorded = [step for step in samples.record.steps if step in visited]
            indices = {group["index"] for groups in visited.values() for group in groups}
            yield from (f"{name}?run={run}" for name in ("prompts", "words"))
            yield from (f"step?run={run}&step={step}" for step in visited)
            yield from (f"group?run={run}&step={s}&ticket={group.ticket}" for s in recorded for group in samples.groups(s))
            yield from (f"validation?run={run}&step={step}" for step in samples.validated if step in steps)
            yield from (f"prompt?run={run}&index={index}" for index in sorted(indices))


def about(samples: Samples) -> dict:
    """Return a run's name, curves, and steps."""
    names = [*CURVES, *sorted({name for row in samples.figures.values() for name in row if name.startswith("val-core/")})]
    every = {name: [[step, row[name]] for step, row in samples.figures.items() if row.get(name) is not None] for name in names}
    curves = {name: points for name, points in every.items() if points}
    recorded = {*samples.record.steps}
    steps = [{"step": step, "recorded": step in recorded} | _sums(groups) for step, groups in samples.visits.items()]
    of_run = {"name": samples.run_dir.name, "curves": curves, "why": explanations.of(curves)}
    return of_run | {"steps": steps, "validated": samples.validated}


def _sums(groups: list[dict]) -> dict:
    trained = [group for group in groups if "left_out" not in group]
    scores = [score for group in trained for score in group["scores"]]
    lengths = [length for group in trained for length in group["lengths"]]
    flat = sum(len({*group["scores"]}) == 1 for group in trained)
    counts = {"groups": len(trained), "left_out": len(groups) - len(trained), "flat": flat, "unscored": scores.count(None)}
    return counts | {"score": mean(scores), "tokens": mean(lengths)}


def step(samples: Samples, step: int) -> dict:
    """Return a step's groups, with what the texts of recorded ones show."""
    groups = samples.groups(step) if step in samples.record.steps else []
    measured = {group.ticket: _measures(samples, group) for group in groups}
    rows = [visit | measured.get(visit["ticket"], {}) for visit in samples.history[0][step]]
    return {"step": step, "recorded": bool(groups), "groups": rows}


def _measures(samples: Samples, group: Group) -> dict:
    """Return the beginning of a group's prompt, and means over its responses."""
    measured = samples.measures(group)
    means = {name: mean(of[name] for of in measured) for name in ("repeated", "copied", "compressed")}
    means["strange"] = mean(sum(of["strange"].values()) for of in measured)
    means["cut"] = mean(response.finish_reason == "length" for response in group.responses)
    return means | {"prompt": samples.text(group.prompt_ids)[:BEGINNING]}


def group(samples: Samples, step: int, ticket: int) -> dict:
    """Return a recorded group: its prompt, and each response with its tokens."""
    (recorded,) = (group for group in samples.groups(step) if group.ticket == ticket)
    found = samples.about(step, ticket) | {"prompt": samples.text(recorded.prompt_ids), "responses": []}
    computed = learner.read(samples.record.directory, step)
    for number, (row, response) in enumerate(zip(samples.rows(recorded), recorded.responses, strict=True)):
        columns = {"log-prob": response.log_probs, "version": response.versions} | computed.get((ticket, number), {})
        row |= {"ticket": ticket, "number": number}
        row["columns"] = {
            name: [None if np.isnan(x) else round(x, 4) for x in column.tolist()]
            for name, column in columns.items()
            if not np.isnan(column).all()
        }
        row["parts"] = [(who, tokens.start, tokens.stop) for who, tokens in parts_of(response)]
        row |= {"ids": response.token_ids.tolist(), "pieces": samples.pieces(response.token_ids)}
        if response.images:
            from tools.view import pictures  # late: few runs have images

            row["images"] = pictures.urls(file.tobytes() for file in response.images)
        found["responses"].append(row | {"sampled": sampled(response).tolist()})
    scores = [response.score for response in recorded.responses]
    found["advantages"] = [None if score is None else score - mean(scores) for score in scores]
    if recorded.images:
        from tools.view import pictures

        try:
            if recorded.image_files:
                found["images"] = pictures.urls(file.tobytes() for file in recorded.image_files)
            else:
                found["images"] = pictures.of_row(found.get("where", ""), samples.record.start_of(step)["flags"])
        except UserError as error:
            found["images_error"] = str(error)
    return found


def prompts(samples: Samples) -> list[dict]:
    """Return every prompt that was visited: how often, its scores, and the share of visits without a difference."""
    rows = []
    for index, visits in sorted(samples.history[1].items()):
        scores = [visit["score"] for visit in visits]
        row = {name: visits[-1][name] for name in ("where", "source", "truth", "visits")}
        row |= {"index": index, "steps": [visit["step"] for visit in visits], "scores": scores}
        row |= {"first_score": scores[0], "last_score": scores[-1]}
        rows.append(row | {"flat": mean(len({*visit["scores"]}) == 1 for visit in visits)})
    return rows


def prompt(samples: Samples, index: int) -> list[dict]:
    """Return all visits to a prompt."""
    return samples.history[1][index]


def validation(samples: Samples, step: int) -> list[dict]:
    """Return the responses of a validation, each with the score of its prompt in the validation before."""
    earlier = [at for at in samples.validated if at < step]
    before = {row["prompt"]: row["score"] for row in samples.validation(earlier[-1])} if earlier else {}
    return [row | {"before": before.get(row["prompt"])} for row in samples.validation(step)]


def words(samples: Samples) -> dict:
    """Return scores by length in all steps, and the phrases that became more frequent in the recorded ones."""
    steps = sorted(samples.visits)
    pairs = [
        (length, np.nan if score is None else score, min(3 * i // max(len(steps) - 1, 1), 2))
        for i, step in enumerate(steps)
        for group in samples.visits[step]
        for length, score in zip(group["lengths"], group["scores"], strict=True)
    ]
    recorded = samples.record.steps
    third = -(-len(recorded) // 3) if len(recorded) > 1 else 0
    parts = [recorded[:third], recorded[len(recorded) - third :]]
    phrases = texts.phrases(*(_scored(samples, part) for part in parts))
    return {"lengths": texts.by_length(*np.array(pairs, float).reshape(-1, 3).T), "steps": parts, "phrases": phrases}


def _scored(samples: Samples, steps: list[int]) -> list[tuple[str, float]]:
    """Return (text, score) of at most about READ scored responses, evenly from these steps."""
    found = []
    for step in steps:
        scored = [response for group in samples.groups(step) for response in group.scored]
        found += [(samples.said(r), r.score) for r in scored[:: 1 + len(scored) * len(steps) // READ]]
    return found


def search(samples: Samples, step: int, text: str) -> list[dict]:
    """Return the responses of a recorded step that have the text, in any case and with any space between its words."""
    wanted = re.compile(r"\s*".join(map(re.escape, text.split())), re.I)
    every = (
        {"ticket": group.ticket, "number": number, "score": response.score, "response": samples.text(response.token_ids)}
        for group in samples.groups(step)
        for number, response in enumerate(group.responses)
    )
    return [row for row in every if wanted.search(row["response"])]


QUESTIONS = {its.__name__: its for its in (step, group, prompts, prompt, validation, words, search)}
