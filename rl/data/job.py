"""The parts of a rank before the first step, apart from its engine and its learner."""

import bisect
import itertools
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl.data.prompts import FileRows, PromptDataset, PromptOrder
from rl.errors import UserError


@dataclass(frozen=True)
class Job:
    script: str  # its file's name without .py, under which a copy of a script logs, saves and resumes
    path: str  # of the model: a directory or a hub name
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset  # for training
    val_prompts: PromptDataset | None  # None without --test-freq or --val-only
    order: PromptOrder
    total_steps: int
    notes: dict = field(default_factory=dict)  # further entries of the run's config.json
    environments: Any = None  # with --env or --tools: the rank's rl.environments.pool.Environments
    val_sets: Any = None  # if a validation file has a name or sampling of its own: rl.generation.val_sets.ValSets
    teacher_prompts: Any = None  # with --teacher-prompt: rl.data.teacher_prompts.TeacherPrompts


def order_of(rows: FileRows, seed: int, shuffle: bool) -> PromptOrder:
    """Return the order of the rows, by the weights of their files if these have any. Raise UserError if one has no row."""
    if not rows.weights:
        return PromptOrder(len(rows), seed, shuffle)
    from rl.data.weights import WeightedOrder  # late: few runs have any

    ends = [bisect.bisect_left(rows.rows, end) for end in rows.ends]
    sizes = [end - begin for begin, end in itertools.pairwise([0, *ends])]
    if 0 in sizes:
        raise UserError(f"--train-files: {rows.files[sizes.index(0)]} has a weight, and no row that is used. Leave it out.")
    return WeightedOrder(sizes, rows.weights, seed, shuffle)
