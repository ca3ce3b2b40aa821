"""The parts of a rank before the first step, apart from its engine and its learner."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl.data.prompts import PromptDataset, PromptOrder


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
    teacher_prompts: Any = None  # with --teacher-prompt: rl.data.teacher_prompts.TeacherPrompts
