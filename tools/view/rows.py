"""A run's recorded samples as text.

`read` yields a row for each response, for notebooks and `view.py --jsonl`:

    step, ticket, epoch    the training step; the place in the prompt order; the pass over the data
    left_out               why the group is not trained ("filtered", "stale"); null if it is
    where, source, ground_truth    the row of the data
    prompt, response       texts as the model saw them, special tokens included
    parts                  [[who, text], ...] of the response: "policy" sampled it, "environment" added it
    number, score, extra, error    of this response in its group; the score is null if it could not be scored, for `error`
    finish                 "stop" or "length"
    turns, environment_tokens, histories    the policy's turns; tokens it did not sample; lengths of an agent's conversations
    prompt_tokens, tokens, versions    counts; the oldest and the newest weights that sampled a token
    mean_log_prob          of the sampled tokens, under the weights that sampled them
    repeated               share of the policy's sequences of 4 words that it has written before
    compressed             its text's size over that without compression
    strange                script -> characters of scripts that the prompt does not use ("CJK", "control", "broken", "symbol")
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rl.errors import UserError
from rl.record import validations
from rl.record.run import GROUPS, METRICS
from rl.samples.group import Group, Response
from rl.samples.recorder import Record, step_of, steps_of
from tools.view.texts import measures

HALF, MOST_OF_A_CHARACTER = "\ufffd", 8  # what stands for bytes of no character; tokens that may share one


def read(run: str | Path, steps: Iterable[int] | None = None) -> Iterator[dict]:
    """Yield a row for each recorded response of a run's directory. steps: by default all that were recorded. Raise UserError if
    the run recorded none."""
    samples = Samples(Path(run))
    for row, _ in responses(samples, samples.record.steps if steps is None else steps):
        yield row


def responses(samples: "Samples", steps: Iterable[int]) -> Iterator[tuple[dict, Response]]:
    """Yield each recorded response of the steps, as (row, response)."""
    for step in steps:
        about = samples.about(step)
        for group in samples.groups(step):
            of_prompt = {name: about.get(group.ticket, {}).get(name) for name in ("epoch", "left_out", "where", "ground_truth")}
            prompt = samples.text(group.prompt_ids)
            for number, response in enumerate(group.responses):
                row = {"step": step, "ticket": group.ticket, "source": group.data_source} | of_prompt
                yield row | {"prompt": prompt, "number": number} | samples.row(group, response), response


class Samples:
    """The samples and the figures of a run."""

    def __init__(self, run_dir: Path):
        """Raise UserError if the run recorded none."""
        self.run_dir = run_dir
        self.record = Record(run_dir)
        self.groups = lru_cache(maxsize=4)(self._groups)
        self._later = lru_cache(maxsize=None)(lambda token: self._text_after([token], True))  # many tokens, few different ones

    def _groups(self, step: int) -> list[Group]:
        """Return a step's groups, trained and left out."""
        return self.record.groups(step) + self.record.left_out(step)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of a checkpoint, or else of the model that training began with."""
        from transformers import AutoTokenizer

        from rl.model.pretrained import resolve

        flags = self.record.starts[-1]["flags"]
        saved = sorted(self.run_dir.glob("step_*/tokenizer.json"))
        where = saved[-1].parent if saved else resolve(flags["model"])
        try:
            return AutoTokenizer.from_pretrained(where, trust_remote_code=flags["trust_remote_code"])
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: the tokenizer of {self.run_dir} cannot be read ({error}).") from error

    @cached_property
    def figures(self) -> dict[int, dict]:
        """Step -> its metrics, and those of its validation."""
        rows = {row["step"]: row for row in validations.rows_of(self.run_dir / METRICS)}
        for validation in validations.read(self.run_dir):
            found = {name: value for name, value in validation.items() if validations.is_of_validation(name)}
            rows[validation["step"]] = rows.get(validation["step"], {"step": validation["step"]}) | found
        return dict(sorted(rows.items()))

    @cached_property
    def visits(self) -> dict[int, list[dict]]:
        """Step -> its groups without tokens, of all steps, recorded or not (groups.jsonl)."""
        return {row["step"]: row["groups"] for row in validations.rows_of(self.run_dir / GROUPS)}

    @cached_property
    def by_prompt(self) -> dict[int, list[tuple[int, dict]]]:
        """Index of a prompt in the data -> its visits (step, group), in order."""
        found: dict[int, list[tuple[int, dict]]] = {}
        for step, groups in sorted(self.visits.items()):
            for group in groups:
                found.setdefault(group["index"], []).append((step, group))
        return found

    @property
    def validated(self) -> list[int]:
        """The steps whose validation's responses there are, ascending."""
        return [step_of(file) for file in steps_of(self.run_dir / validations.RESPONSES)]

    def validation(self, step: int) -> list[dict]:
        """Return the responses of a validation: prompt, response, ground_truth, score."""
        return validations.rows_of(self.run_dir / validations.RESPONSES / f"step_{step:06d}.jsonl")

    def about(self, step: int) -> dict[int, dict]:
        """Ticket -> what groups.jsonl says of a step's group."""
        return {group["ticket"]: group for group in self.visits.get(step, [])}

    def row(self, group: Group, response: Response) -> dict:
        """Return what `read` says of a response alone."""
        mask = slice(None) if response.mask is None else response.mask
        sampled = response.log_probs[mask]
        parts = [[who, text] for who, text, _ in self.parts(response)]
        return {
            "response": self.text(response.token_ids),
            "parts": parts,
            "score": response.score,
            "extra": response.extra,
            "error": response.error,
            "finish": response.finish_reason,
            "turns": sum(who == "policy" for who, _ in parts),
            "environment_tokens": len(response.token_ids) - response.sampled,
            "histories": response.histories,
            "prompt_tokens": len(group.prompt_ids),
            "tokens": len(response.token_ids),
            "versions": [int(response.versions.min()), int(response.versions.max())] if len(response.versions) else None,
            "mean_log_prob": float(sampled.mean()) if len(sampled) else None,
        } | self.measures(response, self.text(group.prompt_ids))

    def said(self, response: Response) -> str:
        """Return the text that the policy sampled."""
        return self.text(response.token_ids if response.mask is None else response.token_ids[response.mask])

    def measures(self, response: Response, prompt: str) -> dict:
        """Return what tools/view/texts.py measures of a response."""
        return measures(self.said(response), prompt)

    def parts(self, response: Response) -> Iterator[tuple[str, str, slice]]:
        """Yield (who, text, its tokens) of each run of tokens that the policy sampled, or that its environment added."""
        mask = np.ones(len(response.token_ids), bool) if response.mask is None else response.mask
        ends = [*(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), *([len(mask)] if len(mask) else [])]
        for start, end in itertools.pairwise([0, *ends]):
            yield "policy" if mask[start] else "environment", self.text(response.token_ids[start:end]), slice(start, end)

    def text(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([*map(int, ids)], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the text of each token; joined, they are the whole text. Where tokens share a character, the last one has
        it."""
        pieces: list[str] = []
        part: list[int] = []  # tokens that end within a character
        for token in map(int, ids):
            part.append(token)
            text = self._later(token) if len(part) == 1 and pieces else self._text_after(part, bool(pieces))
            if text.endswith(HALF) and len(part) < MOST_OF_A_CHARACTER:
                pieces.append("")
                continue
            pieces.append(text)
            part = []
        if part:  # the end is within a character
            pieces[-1] = self._text_after(part, len(pieces) > len(part))
        return pieces

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self.tokenizer.encode("a", add_special_tokens=False)[-1:]
        return ids, self.text(ids)

    def _text_after(self, ids: list[int], others: bool) -> str:
        """Return the text of tokens that follow others, or none: some tokenizers drop the space before a first word."""
        if not others:
            return self.text(ids)
        anchor, its_text = self._anchor
        return self.text(anchor + ids)[len(its_text) :]


def mean(scores: Iterable[float | None]) -> float | None:
    """Return the mean of the scores that there are."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else None
