"""Checkpoints, their flags and files: all that a run needs to continue as if it had never stopped, and the model as a Hugging
Face directory.

    runs/<name>/step_000020/            config, tokenizer, weights: AutoModelForCausalLM.from_pretrained loads it
    runs/<name>/step_000020/adapter/    with --lora-rank: the adapter by itself, as peft has it
    runs/<name>/step_000020/training/   fp32 weights and optimizer moments, a file a learner; state.json; groups
    runs/<name>/best                    a link to the saved step that validated best

A learner's file holds its parts of the tensors that training changes, by `<set>.<parameter>`: the set `model` or, with
--lora-rank, only `adapter`, since the rest is read from --model again; then the optimizer's `exp_avg`, `exp_avg_sq`. It is a
safetensors file that torch.distributed.checkpoint reads, on any number of learners. Nothing is pickled.
"""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import xxhash

from rl import parts
from rl.data.prompts import PromptDataset
from rl.hub import sample
from rl.masking import masked
from rl.model.pretrained import resolve
from rl.parts import Part
from rl.ranges import Content, MayChange, Range, marks
from rl.record.run import Origin
from rl.samples.group import Group

TRAINING, STATE, GROUPS, UNFINISHED = "training", "state.json", "groups.bin", "unfinished.bin"
LAYOUT = 2  # of the files; another one is refused
STEPS = "step_" + "[0-9]" * 6


@dataclass(frozen=True)
class CheckpointArgs(Part):
    """Checkpoints and resuming."""

    _field = "checkpoint"

    save_freq: MayChange[Annotated[int, Range(at_least=0, also=-1)]] = 0
    """Steps between checkpoints. The last step is always saved; 0 or -1 saves nothing else."""
    max_ckpt_to_keep: MayChange[Annotated[int, Range(at_least=0)]] = 3
    """Number of checkpoints to keep, the newest ones; 0 keeps all. The best one by validation is always kept."""
    resume_mode: MayChange[str] = "auto"
    """auto: resume --experiment-name from its newest checkpoint, with the same settings; disable: start over; or the path of a
    checkpoint, also with other settings, which are printed. After a restart by torchrun the job always resumes its own run."""


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def checkpoints(run_dir: Path) -> list[Path]:
    """Return a run's checkpoints that can be resumed from, oldest first."""
    return [file.parent.parent for file in sorted(run_dir.glob(f"{STEPS}/{TRAINING}/{STATE}"))]


def hidden(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint that is being written or removed."""
    return checkpoint.with_name(f".{checkpoint.name}")


def reader(path: Path):
    """Return torch's reader of a checkpoint's training/."""
    from torch.distributed import checkpoint as dcp  # late: it takes a while to import

    return dcp.HuggingFaceStorageReader(str(path / TRAINING))


def read_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read tensors of a checkpoint's training/, whole ones or this rank's parts, in place, whatever their precision."""
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings(action="ignore"):  # that it does not ask other ranks
        dcp.load(tensors, storage_reader=reader(path), no_dist=True)


@dataclass
class Resumed:
    """The point at which a run begins: after `step`, with the checkpoint's content. A new run has step 0 and no content."""

    origin: Origin | None = None
    state: dict = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)  # received and not trained yet
    unfinished: list[Group] = field(default_factory=list)  # still being generated

    @property
    def step(self) -> int:
        return self.origin.step if self.origin else 0


def identity_of(args, script: str, path: str, prompts: PromptDataset) -> dict:
    """Return a run's identity, by which it resumes as the same run (resume.py), as JSON holds it, without secrets: the script,
    its flags, and a digest of each content that these name. path: the model's directory or hub name. prompts: to train."""
    contents = {"model": _digest_model(path), "train_files": _digest_prompts(prompts)}
    contents["tokenizer"] = _digest_tokenizer(prompts.tokenizer)
    for name, content in marks(type(args), Content).items():
        if value := parts.get(args, name):
            from user_processes.files import digest_code  # late: few runs have code of their own

            contents[name] = _digest_model(resolve(value)) if content.kind == "model" else digest_code(value)
    return masked(json.loads(json.dumps({"script": script, "flags": parts.flat(args), "contents": contents})))


def _digest_model(path: str) -> str:
    """Return a digest of the weights in a directory: names, sizes, and SAMPLES pieces of each file. Training changes all."""
    files = sorted(file for kind in ("*.safetensors", "*.bin") for file in Path(path).glob(kind)) if Path(path).is_dir() else []
    return sample(files) if files else path  # a hub name


def _digest_prompts(prompts: PromptDataset) -> str:
    """Return the number of prompts, with a digest of the files' bytes; for a data set that is no file, of 1,000 rows. Also the
    files' weights, if they have any: the order depends on them."""
    state = xxhash.xxh3_64()
    for file, table in zip(prompts.files, prompts.tables, strict=True):
        if Path(file).is_file():
            from user_processes.files import digest_file

            state.update(digest_file(Path(file)).encode())
        else:
            spread = range(0, len(table), max(1, len(table) // 1000))
            state.update(json.dumps([len(table), *(table[i] for i in spread)], default=str).encode())
    weights = [f"weights {', '.join(map(str, prompts.weights))}"] if prompts.weights else []
    return ", ".join([f"{len(prompts)} prompts", state.hexdigest(), *weights])


def _digest_tokenizer(tokenizer) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items())
    return xxhash.xxh3_64_hexdigest(json.dumps([vocabulary, tokenizer.chat_template]).encode())
