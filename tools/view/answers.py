"""What the page asks, and its answers: a question is a place of the page, such as 0/step/12 for a step of the first run, and an
answer is a value for JSON, mostly tables. The server and the file for a colleague (--html) give the same answers."""

import re
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rl.errors import UserError
from rl.samples.group import Group
from tools.view import explanations, learner, pictures, texts
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
BEGINNING = 200  # characters of a prompt in a list
READ = 2000  # responses of the first and of the last steps, at most, whose phrases are counted


class Answers:
    """The answers about some runs."""

    def __init__(self, runs: Iterable[Path]):
        self.runs = [Samples(run) for run in runs]

    def __call__(self, path: str) -> object:
        """Return the answer of a path. Raise UserError if there is none."""
        if path == "runs":
            return [about(samples) for samples in self.runs]
        try:
            run, name, *given = path.split("/", 3)
            if (name, len(given)) in OF_RUNS:
                return OF_RUNS[name, len(given)](self.runs, int(run), *map(int, given))
            return OF_RUN[name](self.runs[int(run)], *map(int, given[:1]), *given[1:])
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"no answer to {path}: {error!r}") from error

    def paths(self, steps: range) -> Iterator[str]:
        """Yield every path that the page may ask of these steps."""
        yield "runs"
        for run, samples in enumerate(self.runs):
            visited = {step: groups for step, groups in samples.visits.items() if step in steps}
            recorded = [step for step in samples.record.steps if step in visited]
            indices = {group["index"] for groups in visited.values() for group in groups}
            yield from (f"{run}/{name}" for name in ("prompts", "words", *["validation"] * bool(samples.validated)))
            yield from (f"{run}/step/{step}" for step in visited)
            yield from (f"{run}/step/{step}/{group.ticket}" for step in recorded for group in samples.groups(step))
            yield from (f"{run}/validation/{step}" for step in samples.validated if step in steps)
            yield from (f"{run}/prompt/{index}" for index in sorted(indices))


def table(title: str, rows: list[dict], fields: str, by: str = "", note: str = "") -> dict:
    """Return a table. fields: of the rows, those to show; by: that to sort by, with - for the largest first. A row leads to its
    `to`, a place of the page without the run."""
    return {"title": title, "rows": rows, "fields": fields, "by": by, "note": note}


def about(samples: Samples) -> dict:
    """Return a run's name, curves, and steps, as they are now."""
    samples.look_again()
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


def step(samples: Samples, step: int) -> list[dict]:
    """Return a step's groups, those first that fell most, with what the texts of recorded ones show."""
    groups = samples.groups(step) if step in samples.record.steps else []
    measured = {group.ticket: _measures(samples, group) for group in groups}
    rows = [measured.get(visit["ticket"], {}) | visit for visit in samples.history[0][step]]
    for row in rows:
        row["to"] = f"step/{step}/{row['ticket']}" if groups else f"prompt/{row['index']}"
    rows.sort(key=lambda row: (row["score"] is None, row["score"]))
    fields = f"change score scores tokens visits {'cut repeated copied compressed strange' if groups else 'where'} prompt truth"
    note = "cut: share of the responses; repeated, copied, compressed, strange characters: means over them"
    note = note if groups else "The texts of this step were not kept (--record-samples all keeps every step)."
    found = [table(f"Step {step}", [row for row in rows if "left_out" not in row], fields, "change", note)]
    left_out = [row for row in rows if "left_out" in row]
    return found + [table("Groups that are not trained", left_out, f"left_out {fields}", "change")] * bool(left_out)


def _measures(samples: Samples, group: Group) -> dict:
    """Return the beginning of a group's prompt, and means over its responses."""
    measured = samples.measures(group)
    means = {name: mean(of[name] for of in measured) for name in ("repeated", "copied", "compressed")}
    means["strange"] = mean(sum(of["strange"].values()) for of in measured)
    means["cut"] = mean(response.finish_reason == "length" for response in group.responses)
    return means | {"prompt": samples.text(group.prompt_ids)[:BEGINNING]}


def group(runs: list[Samples], run: int, step: int, ticket: int) -> dict:
    """Return a recorded group: its prompt, and each response with its tokens; and where other runs have its prompt."""
    samples = runs[run]
    (recorded,) = (group for group in samples.groups(step) if group.ticket == ticket)
    found = samples.about(step, ticket) | {"step": step, "prompt": samples.text(recorded.prompt_ids), "responses": []}
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
        row["images"] = pictures.urls(file.tobytes() for file in response.images or ())
        found["responses"].append(row | {"sampled": sampled(response).tolist()})
    scores = [response.score for response in recorded.responses]
    found["advantages"] = [None if score is None else score - mean(scores) for score in scores]
    elsewhere = [visit for visit in _visits(runs, run, found["index"]) if visit["recorded"] and visit["run"] != run]
    elsewhere.sort(key=lambda visit: -abs(visit["step"] - step))
    found["others"] = [*{visit["run"]: [visit[name] for name in ("run", "step", "ticket")] for visit in elsewhere}.values()]
    try:
        found["images"] = pictures.urls(file.tobytes() for file in recorded.image_files or ())
        if recorded.images and not found["images"]:
            found["images"] = pictures.of_row(found.get("where", ""), samples.record.start_of(step)["flags"])
    except UserError as error:
        found["images_error"] = str(error)
    return found


def _visits(runs: list[Samples], run: int, index: int) -> list[dict]:
    """Return all visits of all runs to a prompt of one of them."""
    every = [visit | {"run": i} for i, samples in enumerate(runs) for visit in samples.history[1].get(index, [])]
    own = next(visit for visit in every if visit["run"] == run)
    return [visit for visit in every if (visit["where"], visit["truth"]) == (own["where"], own["truth"])]


def prompt(runs: list[Samples], run: int, index: int) -> list[dict]:
    """Return all visits to a prompt."""
    rows = [visit | {"tokens": " ".join(map(str, visit["lengths"]))} for visit in _visits(runs, run, index)]
    for row in rows:
        row["of_run"] = runs[row["run"]].run_dir.name
        row |= {"to": f"step/{row['step']}/{row['ticket']}"} if row["recorded"] else {}
    fields = f"step {'of_run ' * (len(runs) > 1)}score scores tokens recorded"
    note = f"{rows[-1].get('prompt', '')} Ground truth: {rows[-1]['ground_truth']}"
    return [table(rows[-1]["where"], rows, fields, "step", note)]


def prompts(samples: Samples) -> list[dict]:
    """Return every prompt that was visited: how often, its scores, and the share of visits without a difference."""
    rows = []
    for index, visits in sorted(samples.history[1].items()):
        scores = [visit["score"] for visit in visits]
        row = {name: visits[-1].get(name) for name in ("prompt", "where", "source", "truth", "visits")}
        row |= {"to": f"prompt/{index}", "scores": scores, "first_score": scores[0], "last_score": scores[-1]}
        rows.append(row | {"flat": mean(len({*visit["scores"]}) == 1 for visit in visits)})
    hopeless, solved = (sum(row["visits"] > 1 and {*row["scores"]} == {score} for row in rows) for score in (0, 1))
    note = f"{len(rows)} prompts, {hopeless} always 0 in several visits, {solved} always 1"
    return [table("Prompts", rows, "last_score scores first_score visits flat prompt truth where source", "last_score", note)]


def validation(samples: Samples, step: int | None = None) -> list[dict]:
    """Return the responses of a validation, each with the score of its prompt in the validation before. step: by default the
    last one's."""
    if not samples.validated:
        raise UserError("no responses of validations were recorded")
    step = samples.validated[-1] if step is None else step
    earlier = [at for at in samples.validated if at < step]
    before = {row["prompt"]: row["score"] for row in samples.validation(earlier[-1])} if earlier else {}
    rows = [row | {"before": before.get(row["prompt"])} for row in samples.validation(step)]
    return [table(f"Validation after step {step}", rows, "score before prompt response ground_truth", "score")]


def words(samples: Samples) -> list[dict]:
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
    rows = [row | {"to": f"search/{urllib.parse.quote(row['phrase'], safe='')}"} for row in phrases]
    first, last = (f"{part[0]} to {part[-1]}" if part else "none" for part in parts)
    note = f"Shares of the responses of the recorded steps {first} and {last}; scores of the latter. If a phrase spreads and "
    return [
        table(
            "Scores by length in all steps, with shares of the first and the last third",
            texts.by_length(*np.array(pairs, float).reshape(-1, 3).T),
            "from to responses score first last",
        ),
        table("Phrases that spread", rows, "phrase rise first last with without", "-rise", f"{note}scores better, read it."),
    ]


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


OF_RUN = {its.__name__: its for its in (step, prompts, validation, words, search)}
OF_RUNS = {("step", 2): group, ("prompt", 1): prompt}  # by the count of their numbers
