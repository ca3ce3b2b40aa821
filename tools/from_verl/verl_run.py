"""A verl run to translate: the keys that were given, verl's defaults for the others, and the remarks to print."""

from dataclasses import dataclass, field
from pathlib import Path

import yaml

SYNC, ONE_STEP_OFF, ASYNC, SFT = "train_sync.py", "train_one_step_off.py", "train_async.py", "train_sft.py"
V1 = "trainer.v1."  # keys of verl's newer trainer
PRESET = "algorithm.rollout_correction"  # a word, or the head of keys


@dataclass
class Run:
    """A verl run that is being translated. Keys have the name that the table uses, in full; methods also take them short."""

    script: str
    given: dict[str, object]
    defaults: dict[str, object]
    is_v1: bool = False  # the asynchronous mode of verl's newer trainer, whose steps are publishes
    missing: dict[str, str] = field(default_factory=dict)  # key -> what is not here
    idle: dict[str, str] = field(default_factory=dict)  # key -> why it has no effect in this run
    notes: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)  # what the command lacks to train what was meant
    forks: dict[str, tuple[str, ...]] = field(default_factory=dict)  # diff of examples/forks -> the flags that it adds
    launch: dict[str, int] = field(default_factory=dict)  # torchrun's --nnodes and --nproc-per-node

    def __getitem__(self, key: str) -> object:
        """Return the given value, or verl's default."""
        key = in_full(key)
        return self.given.get(key, self.defaults.get(key))

    def has(self, key: str) -> bool:
        return in_full(key) in self.given

    def lacks(self, key: str, what: str) -> None:
        """Record that the key asks for something that is not here. Nothing is recorded for a default."""
        if self.has(key):
            self.missing[in_full(key)] = what

    def skips(self, keys: str, why: str) -> None:
        """Record that the keys have no effect in this run."""
        self.idle |= dict.fromkeys(in_full(keys).split(), why)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def prompts_a_step(self) -> int:
        if self.script == ASYNC:
            return self["A.actor.ppo_mini_batch_size"] * self["async_training.require_batches"]
        return self["data.train_batch_size"]

    @property
    def steps(self) -> int | None:
        """Return the run's training steps, if they do not depend on the size of the data."""
        steps = self["trainer.total_training_steps"]
        if self.is_v1:
            return steps and steps * self["async_training.trigger_parameter_sync_step"]
        if self.script == ASYNC:
            return self["rollout.total_rollout_steps"] // max(1, self.prompts_a_step)
        return steps

    @property
    def full_length(self) -> int:
        if self.script == SFT:
            return self["data.max_length"]
        return self["data.max_prompt_length"] + self["data.max_response_length"]

    @property
    def corrects(self) -> bool:
        return bool(self[PRESET] or self[PRESET + ".rollout_is"] or self[PRESET + ".rollout_rs"])


def in_full(keys: str) -> str:
    """Return keys without abbreviations: `A.` stands for actor_rollout_ref., `V1.` for trainer.v1."""
    return keys.replace("A.", "actor_rollout_ref.").replace("V1.", V1)


def listed(value: object) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def data(name: str) -> dict | list:
    """Return what a YAML file of this folder has."""
    return yaml.safe_load((Path(__file__).parent / name).read_text())
