"""What the page asks, and its answers: each question is a path, each answer a value for JSON. The server and the file for a
colleague (--html) give the same answers."""

import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from rl.errors import UserError
from rl.samples.group import Group, Response
from tools.view.learner import read as learner_columns
from tools.view.rows import Samples, mean

CURVES = (
    "critic/score/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "actor/grad_norm",
    "training/rollout_probs_diff_mean",
    "staleness/mean",
    "reward/unscored",
)
BEGINNING = 160  # characters of a prompt in a list


class Answers:
    """The answers about some runs."""

    def __init__(self, runs: Iterable[Path]):
        self.runs = [Samples(run) for run in runs]
        self._asked: dict[str, Callable[..., object]] = {
            "runs": self.about_runs,
            "step": self.step,
            "group": self.group,
            "prompts": self.prompts,
            "prompt": self.prompt,
            "validation": self.validation,
        }

    def __call__(self, path: str) -> object:
        """Return the answer of a path, such as step?run=0&step=12. Raise UserError if there is none."""
        name, _, query = path.partition("?")
        try:
            numbers = {key: int(value) for key, value in urllib.parse.parse_qsl(query)}
            return self._asked[name](**numbers)
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
        return {"name": samples.run_dir.name, "curves": curves, "steps": steps, "validated": samples.validated}

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
            begins = samples.text(group.prompt_ids)[:BEGINNING] if group else ""
            rows.append(about | {"score": score, "change": change, "visits": len(earlier) + 1, "prompt": begins})
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
        prompt = samples.text(group.prompt_ids)
        return about | {"step": step, "prompt": prompt, "responses": responses, "advantages": _advantages(group)}

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
        return [
            {
                "index": index,
                "where": visits[-1][1]["where"],
                "source": visits[-1][1]["source"],
                "ground_truth": visits[-1][1]["ground_truth"],
                "scores": [mean(group["scores"]) for _, group in visits],
                "steps": [step for step, _ in visits],
                "flat": sum(len({*group["scores"]}) == 1 for _, group in visits) / len(visits),
            }
            for index, visits in sorted(self.runs[run].by_prompt.items())
        ]

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

    def paths(self, steps: range) -> Iterator[str]:
        """Yield every path that the page may ask of these steps."""
        yield "runs"
        for run, samples in enumerate(self.runs):
            yield f"prompts?run={run}"
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
    return {
        "groups": len(trained),
        "left_out": len(groups) - len(trained),
        "flat": flat,
        "score": mean(scores),
        "tokens": mean(lengths),
        "unscored": scores.count(None),
    }


def _rounded(numbers: np.ndarray) -> list[float | None]:
    return [None if np.isnan(x) else round(x, 4) for x in numbers.tolist()]


def _advantages(group: Group) -> list[float | None]:
    """Return each response's score less the mean of its group."""
    middle = mean(response.score for response in group.responses)
    return [None if response.score is None else response.score - middle for response in group.responses]
