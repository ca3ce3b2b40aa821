"""A run's recorded samples as text. `read` yields a row for each response, for notebooks and `view.py --jsonl`:
Samples.responses and Samples.row say what is in it."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rl.algorithm.health import SHARES, shares
from rl.record import validations
from rl.record.run import GROUPS, METRICS
from rl.samples.group import Group, Response
from rl.samples.recorder import step_of, steps_of
from tools.recorded import Record
from tools.view import texts

HALF, MOST_OF_A_CHARACTER = "\ufffd", 8  # what stands for bytes of no character; tokens that may share one


def read(run: str | Path, steps: Iterable[int] | None = None) -> Iterator[dict]:
    """Return a row for each recorded response of a run's directory. steps: by default all that were recorded. Raise UserError
    if the run recorded none."""
    samples = Samples(Path(run))
    return (row for row, _ in samples.responses(samples.record.steps if steps is None else steps))


class Samples:
    """The samples and the figures of a run."""

    def __init__(self, run_dir: Path):
        """Raise UserError if the run recorded none."""
        self.run_dir = run_dir
        self.record = Record(run_dir)
        self.groups = lru_cache(maxsize=4)(self._groups)
        self._text_after = lru_cache(maxsize=None)(self._decode_after)  # many tokens, few different ones

    def _groups(self, step: int) -> list[Group]:
        """Return a step's groups, trained and left out."""
        return self.record.groups(step) + self.record.left_out(step)

    @cached_property
    def tokenizer(self) -> Any:
        """That of a checkpoint, or else of the model that training began with."""
        from rl.model.pretrained import load_tokenizer, resolve

        flags = self.record.starts[-1]["flags"]
        saved = sorted(self.run_dir.glob("step_*/tokenizer.json"))
        path = str(saved[-1].parent) if saved else resolve(flags["model"])
        return load_tokenizer(path, flags["trust_remote_code"], f"{self.run_dir}, tokenizer")

    def look_again(self) -> None:
        """Forget what a run that is under way may have written since."""
        for name in ("figures", "visits", "history"):
            vars(self).pop(name, None)

    @cached_property
    def figures(self) -> dict[int, dict]:
        """Step -> its metrics, and those of its validation."""
        rows = {row["step"]: row for row in validations.rows_of(self.run_dir / METRICS)}
        for row in validations.read(self.run_dir):
            rows.setdefault(row["step"], {}).update({name: row[name] for name in row if validations.is_of_validation(name)})
        return dict(sorted(rows.items()))

    @cached_property
    def visits(self) -> dict[int, list[dict]]:
        """Step -> its groups without tokens, of all steps, recorded or not (groups.jsonl)."""
        return {row["step"]: row["groups"] for row in validations.rows_of(self.run_dir / GROUPS)}

    @cached_property
    def history(self) -> tuple[dict[int, list[dict]], dict[int, list[dict]]]:
        """The same by step and by the index of a prompt, with scores, and their change since the last visit to the prompt."""
        recorded = {*self.record.steps}
        by_step, by_prompt = defaultdict(list), defaultdict(list)
        for step, group in ((step, group) for step, groups in sorted(self.visits.items()) for group in groups):
            earlier = by_prompt[group["index"]]
            score, before = mean(group["scores"]), earlier[-1]["score"] if earlier else None
            visit = group | {"step": step, "score": score, "change": None if None in (score, before) else score - before}
            visit |= {"visits": len(earlier) + 1, "tokens": max(group["lengths"]), "truth": str(group["ground_truth"])[:60]}
            visit["recorded"] = step in recorded
            earlier.append(visit)
            by_step[step].append(visit)
        return dict(by_step), dict(by_prompt)

    @property
    def validated(self) -> list[int]:
        """The steps whose validation's responses there are, ascending."""
        return [step_of(file) for file in steps_of(self.run_dir / validations.RESPONSES)]

    def validation(self, step: int) -> list[dict]:
        """Return the responses of a validation: prompt, response, ground_truth, score."""
        return validations.rows_of(self.run_dir / validations.RESPONSES / f"step_{step:06d}.jsonl")

    def about(self, step: int, ticket: int) -> dict:
        """Return what groups.jsonl says of a group; nothing if it is not there."""
        return next((group for group in self.visits.get(step, []) if group["ticket"] == ticket), {})

    def responses(self, steps: Iterable[int]) -> Iterator[tuple[dict, Response]]:
        """Yield each recorded response of the steps, as (row, response)."""
        for step, group in ((its, group) for its in steps for group in self.groups(its)):
            about = self.about(step, group.ticket)
            row = {
                "step": step,
                "ticket": group.ticket,  # place in the prompt order
                "epoch": about.get("epoch"),  # pass over the data
                "left_out": about.get("left_out"),  # why the group is not trained ("filtered", "stale"); None if it is
                "where": about.get("where"),  # row of the data
                "source": group.data_source,
                "ground_truth": about.get("ground_truth"),
                "prompt": self.text(group.prompt_ids),
                "prompt_tokens": len(group.prompt_ids),
            }
            for number, (response, own) in enumerate(zip(group.responses, self.rows(group), strict=True)):
                yield row | {"number": number} | own, response

    def rows(self, group: Group) -> list[dict]:
        """Return what a row says of each response alone."""
        return [self._row(response) | own for response, own in zip(group.responses, self.measures(group), strict=True)]

    def _row(self, response: Response) -> dict:
        parts = [[who, self.text(response.token_ids[tokens])] for who, tokens in parts_of(response)]
        log_probs = response.log_probs[sampled(response)]
        versions = response.versions
        return {
            "response": self.text(response.token_ids),  # as the model saw it, with special tokens; like the prompt
            "parts": parts,  # of the response, as (who, text): see parts_of
            "score": response.score,  # None if it could not be scored, for `error`
            "extra": response.extra,  # further numbers of the reward function
            "error": response.error,
            "finish": response.finish_reason,  # "stop" or "length"
            "turns": sum(who == "policy" for who, _ in parts),
            "environment_tokens": len(response.token_ids) - response.sampled,  # not sampled by the policy
            "histories": response.histories,  # lengths of an agent's conversations
            "seconds": response.seconds,  # of each turn of an episode: until it was sampled, until it was answered
            "tokens": len(response.token_ids),
            "versions": [int(versions.min()), int(versions.max())] if len(versions) else None,  # oldest and newest weights
            "mean_log_prob": float(log_probs.mean()) if len(log_probs) else None,  # of sampled tokens, under their weights
        }

    def measures(self, group: Group) -> list[dict]:
        """Return of each response `repeated` and `copied` (docs/six-numbers.md), and what tools/view/texts.py measures."""
        prompt = self.text(group.prompt_ids)
        found = zip(group.responses, shares(group, group.responses), strict=True)
        return [dict(zip(SHARES, own, strict=True)) | texts.measures(self.said(response), prompt) for response, own in found]

    def said(self, response: Response) -> str:
        """Return the text that the policy sampled."""
        return self.text(response.token_ids[sampled(response)])

    def answer(self, response: Response) -> str:
        """Return the text that a grader gets: the policy's last turn, without special tokens."""
        turns = [tokens for who, tokens in parts_of(response) if who == "policy"]
        return self.tokenizer.decode(response.token_ids[turns[-1]] if turns else [], skip_special_tokens=True)

    def text(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([*map(int, ids)], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the text of each token; joined, they are the whole text. Where tokens share a character, the last one has
        it."""
        pieces: list[str] = []
        part: tuple[int, ...] = ()  # tokens that end within a character
        for token in map(int, ids):
            part += (token,)
            text = self._text_after(part, len(pieces) >= len(part))
            is_half = text.endswith(HALF) and len(part) < MOST_OF_A_CHARACTER
            pieces.append("" if is_half else text)
            part = part if is_half else ()
        if part:  # the end is within a character
            pieces[-1] = text
        return pieces

    def _decode_after(self, ids: tuple[int, ...], others: bool) -> str:
        """Return the text of tokens that follow others, or none: some tokenizers drop the space before a first word."""
        before = self.tokenizer.encode("a", add_special_tokens=False)[-1:] if others else []
        return self.text([*before, *ids])[len(self.text(before)) :]


def sampled(response: Response) -> np.ndarray:
    """Return [n] bool: the tokens that the policy sampled."""
    return np.ones(len(response.token_ids), bool) if response.mask is None else response.mask


def parts_of(response: Response) -> Iterator[tuple[str, slice]]:
    """Yield (who, its tokens) of each run of tokens: "policy" sampled them, "environment" added them, "prompt" begins a further
    conversation of an agent."""
    mask = sampled(response)
    begins = {*np.cumsum(response.histories or [len(mask)]).tolist()}
    edges = sorted({0, *begins, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()})
    for start, end in itertools.pairwise(edges):
        who = "policy" if mask[start] else "prompt" if start in begins else "environment"
        yield who, slice(start, end)


def mean(scores: Iterable[float | None]) -> float | None:
    """Return the mean of the scores that there are."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else None
