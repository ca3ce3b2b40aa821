"""What the page asks, and its answers: each question is a path, each answer a value for JSON. The server and the file for a
colleague (--html) give the same answers."""

import re
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rl.errors import UserError
from rl.samples.group import Group, Response
from tools.view import explanations, pictures, texts
from tools.view.learner import read as learner_columns
from tools.view.rows import Samples, mean

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
        asked = (self.step, self.group, self.prompts, self.prompt, self.validation, self.words, self.search)
        self._asked = {"runs": self.about_runs} | {its.__name__: its for its in asked}

    def __call__(self, path: str) -> object:
        """Return the answer of a path, such as step?run=0&step=12. Raise UserError if there is none."""
        name, _, query = path.partition("?")
        try:
            given = {key: value if key == "text" else int(value) for key, value in urllib.parse.parse_qsl(query)}
            return self._asked[name](**given)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"no answer to {path}: {error!r}") from error

    def about_runs(self) -> list[dict]:
        """Return each run's name, curves, and steps."""
        return [self._run(samples) for samples in self.runs]

    def _run(self, samples: Samples) -> dict:
        figures = samples.figures
        names = [name for name in CURVES if any(row.get(name) is not None for row in figures.values())]
        names += sorted({name for row in figures.values() for name in row if name.startswith("val-core/")})
        curves = {name: [[s, row[name]] for s, row in figures.items() if row.get(name) is not None] for name in names}
        recorded = {*samples.record.steps}
        steps = [{"step": step, "recorded": step in recorded, **_sums(groups)} for step, groups in samples.visits.items()]
        of_run = {"name": samples.run_dir.name, "curves": curves, "why": explanations.of(names)}
        return of_run | {"steps": steps, "validated": samples.validated}

    def step(self, run: int, step: int) -> dict:
        """Return a step's groups, with the change of each one's mean score since the last visit to its prompt."""
        samples = self.runs[run]
        recorded = {group.ticket: group for group in samples.groups(step)} if step in samples.record.steps else {}
        rows = []
        for about in samples.visits[step]:
            earlier = [visit for at, visit in samples.by_prompt[about["index"]] if at < step]
            score, before = mean(about["scores"]), mean(earlier[-1]["scores"]) if earlier else None
            change = score - before if score is not None and before is not None else None
            group = recorded.get(about["ticket"])
            row = about | {"score": score, "change": change, "visits": len(earlier) + 1}
            rows.append(row | (_texts(samples, group) if group else {}))
        return {"step": step, "recorded": bool(recorded), "groups": rows}

    def group(self, run: int, step: int, ticket: int) -> dict:
        """Return a recorded group: its prompt, and each response with its tokens."""
        samples = self.runs[run]
        (group,) = (group for group in samples.groups(step) if group.ticket == ticket)
        about = samples.about(step).get(ticket, {})
        learner = learner_columns(samples.record.directory, step)
        responses = []
        for number, response in enumerate(group.responses):
            columns = learner.get((ticket, number), {})
            row = samples.row(group, response) | self._tokens(samples, response)
            responses.append(row | {"learner": {name: _rounded(its) for name, its in columns.items()}})
        found = about | {"step": step, "ticket": ticket, "prompt": samples.text(group.prompt_ids), "responses": responses}
        found["advantages"] = _advantages(group)
        if group.images:
            try:
                found["images"] = pictures.urls(about.get("where", ""), samples.record.start_of(step)["flags"])
            except UserError as error:
                found["images_error"] = str(error)
        return found

    def _tokens(self, samples: Samples, response: Response) -> dict:
        n = len(response.token_ids)
        return {
            "ids": response.token_ids.tolist(),
            "pieces": samples.pieces(response.token_ids),
            "log_probs": [round(x, 4) for x in response.log_probs.tolist()],
            "version": response.versions.tolist(),
            "sampled": np.ones(n, bool).tolist() if response.mask is None else response.mask.tolist(),
        }

    def prompts(self, run: int) -> list[dict]:
        """Return every prompt that was visited: how often, its scores, and the share of visits without a difference."""
        rows = []
        for index, visits in sorted(self.runs[run].by_prompt.items()):
            scores = [group["scores"] for _, group in visits]
            row = {name: visits[-1][1][name] for name in ("where", "source", "ground_truth")}
            row |= {"index": index, "scores": [*map(mean, scores)], "steps": [step for step, _ in visits]}
            rows.append(row | {"flat": sum(len({*its}) == 1 for its in scores) / len(visits)})
        return rows

    def prompt(self, run: int, index: int) -> list[dict]:
        """Return all visits to a prompt."""
        recorded = {*self.runs[run].record.steps}
        visits = self.runs[run].by_prompt[index]
        return [{"step": step, "recorded": step in recorded, "score": mean(of["scores"])} | of for step, of in visits]

    def validation(self, run: int, step: int) -> list[dict]:
        """Return the responses of a validation, each with the score of its prompt in the validation before."""
        samples = self.runs[run]
        earlier = [at for at in samples.validated if at < step]
        before = {row["prompt"]: row["score"] for row in samples.validation(earlier[-1])} if earlier else {}
        return [row | {"before": before.get(row["prompt"])} for row in samples.validation(step)]

    def words(self, run: int) -> dict:
        """Return scores by length in all steps, and the phrases that became more frequent in the recorded ones."""
        samples = self.runs[run]
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
        rows = texts.phrases(*(self._scored(samples, part) for part in parts))
        return {"lengths": texts.by_length(*np.array(pairs, float).reshape(-1, 3).T), "steps": parts, "phrases": rows}

    def _scored(self, samples: Samples, steps: list[int]) -> list[tuple[str, float]]:
        """Return (text, score) of at most about READ scored responses, evenly from these steps."""
        found = []
        for step in steps:
            scored = [response for group in samples.groups(step) for response in group.scored]
            found += [(samples.said(r), r.score) for r in scored[:: 1 + len(scored) * len(steps) // READ]]
        return found

    def search(self, run: int, step: int, text: str) -> list[dict]:
        """Return the responses of a recorded step that have the text, in any case and with any space between its words."""
        wanted = re.compile(r"\s*".join(map(re.escape, text.split())), re.I)
        rows = []
        for group in self.runs[run].groups(step):
            texts_of = [self.runs[run].text(response.token_ids) for response in group.responses]
            found = [(i, its) for i, its in enumerate(texts_of) if wanted.search(its)]
            rows += [
                {"ticket": group.ticket, "number": i, "score": group.responses[i].score, "response": its} for i, its in found
            ]
        return rows

    def paths(self, steps: range) -> Iterator[str]:
        """Yield every path that the page may ask of these steps."""
        yield "runs"
        for run, samples in enumerate(self.runs):
            yield f"prompts?run={run}"
            yield f"words?run={run}"
            asked = [step for step in samples.visits if step in steps]
            for step in asked:
                yield f"step?run={run}&step={step}"
                if step in samples.record.steps:
                    yield from (f"group?run={run}&step={step}&ticket={group.ticket}" for group in samples.groups(step))
            yield from (f"validation?run={run}&step={step}" for step in samples.validated if step in steps)
            indices = {group["index"] for step in asked for group in samples.visits[step]}
            yield from (f"prompt?run={run}&index={index}" for index in sorted(indices))


def _sums(groups: list[dict]) -> dict:
    trained = [group for group in groups if "left_out" not in group]
    scores = [score for group in trained for score in group["scores"]]
    lengths = [length for group in trained for length in group["lengths"]]
    flat = sum(len({*group["scores"]}) == 1 for group in trained)
    counts = {"groups": len(trained), "left_out": len(groups) - len(trained), "flat": flat, "unscored": scores.count(None)}
    return counts | {"score": mean(scores), "tokens": mean(lengths)}


def _texts(samples: Samples, group: Group) -> dict:
    """Return the beginning of a recorded group's prompt, and means over its responses."""
    prompt = samples.text(group.prompt_ids)
    measured = [samples.measures(response, prompt) for response in group.responses]
    means = {name: mean(of[name] for of in measured) for name in ("repeated", "compressed")}
    means["strange"] = mean(sum(of["strange"].values()) for of in measured)
    means["cut"] = mean(response.finish_reason == "length" for response in group.responses)
    return means | {"prompt": prompt[:BEGINNING]}


def _rounded(numbers: np.ndarray) -> list[float | None]:
    return [None if np.isnan(x) else round(x, 4) for x in numbers.tolist()]


def _advantages(group: Group) -> list[float | None]:
    """Return each response's score less the mean of its group."""
    middle = mean(response.score for response in group.responses)
    return [None if response.score is None else response.score - middle for response in group.responses]
