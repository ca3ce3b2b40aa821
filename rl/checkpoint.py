"""Checkpoints: everything a run needs to go on as if it had never stopped, beside the model as a Hugging Face directory.

    runs/<name>/step_000020/            config, tokenizer, weights: AutoModelForCausalLM.from_pretrained loads it
    runs/<name>/step_000020/training/   master weights and optimizer moments, a shard a learner; state.json; groups
    runs/<name>/step_000020/manifest.json   every file's size and checksum

A checkpoint is written beside its place and renamed: a kill leaves the last good one. The manifest is checked before anything is
loaded. torch.distributed.checkpoint writes the tensors, as safetensors: nothing is pickled, and another number of learners can
read them.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedTokenizerBase

from rl import dist
from rl.batch import Group, join_records, split_records
from rl.errors import UserError
from rl.learner import Learner

MANIFEST, TRAINING, STATE, GROUPS = "manifest.json", "training", "state.json", "groups.bin"


@dataclass
class CheckpointArgs:
    save_freq: int = 0
    """Save a checkpoint every so many steps; there is always one after the last."""
    max_ckpt_to_keep: int = 3
    """Checkpoints to keep of a run, the newest ones; 0 keeps all."""
    resume_mode: str = "auto"
    """auto goes on from the last good checkpoint of the run --experiment-name, and after a restart by torchrun; disable starts
    anew; or the path of a checkpoint."""


def find(args: CheckpointArgs, output_dir: str, experiment_name: str | None) -> Path | None:
    """The checkpoint to go on from, the same on every rank; None to start anew. Raises UserError if the one that was asked for
    cannot be used."""
    found = _find(args, Path(output_dir), experiment_name) if torch.distributed.get_rank() == 0 else None
    text = dist.all_gather_bytes(str(found or "").encode())[0].decode()
    return Path(text) if text else None


def _find(args: CheckpointArgs, output_dir: Path, experiment_name: str | None) -> Path | None:
    if args.resume_mode == "disable":
        return None
    if args.resume_mode != "auto":
        return check_path(Path(args.resume_mode))
    runs = [output_dir / experiment_name] if experiment_name else []
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):  # this job's own run, whatever its name
        job = os.environ.get("TORCHELASTIC_RUN_ID")
        configs = sorted(output_dir.glob("*/config.json"), key=lambda p: p.stat().st_mtime, reverse=True)
        runs += [path.parent for path in configs if json.loads(path.read_text()).get("job") == job]
    return next((checkpoint for run in runs if (checkpoint := newest(run))), None)


def save(
    run_dir: Path, step: int, learner: Learner, tokenizer: PreTrainedTokenizerBase, state: dict, groups: list[Group], keep: int
) -> Path:
    """Writes the checkpoint of a step; all learners take part. state: anything that JSON can hold; groups: samples that have
    come in and are not trained yet. Raises OSError (disk full, no permission), and then nothing is left of it."""
    target = run_dir / f"step_{step:06d}"
    work = target.with_name(f"{target.name}.partial")
    if learner.ranks.is_main:
        shutil.rmtree(work, ignore_errors=True)
        (work / TRAINING).mkdir(parents=True)
    dist.barrier()
    _export_hf(learner, tokenizer, work)
    dcp.save(learner.state_tensors(), storage_writer=dcp.HuggingFaceStorageWriter(str(work / TRAINING), save_distributed=True))
    ranks = dist.all_gather_bytes(json.dumps(learner.rank_state()).encode())
    if learner.ranks.is_main:
        record = {"step": step, "state": state, "learner": learner.state(), "ranks": [json.loads(r) for r in ranks]}
        (work / TRAINING / STATE).write_text(json.dumps(record))
        (work / TRAINING / GROUPS).write_bytes(join_records([group.to_bytes() for group in groups]))
        _write_manifest(work)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(work, target)
        _forget_old(run_dir, keep)
    dist.barrier()
    return target


def load(path: Path, learner: Learner) -> tuple[int, dict, list[Group]]:
    """Brings the learner to where the checkpoint was written; returns (step, state, groups)."""
    record = json.loads((path / TRAINING / STATE).read_text())
    tensors = learner.state_tensors()
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path / TRAINING)))
    ranks = record["ranks"]
    learner.restore(record["learner"], ranks[learner.ranks.rank] if learner.ranks.rank < len(ranks) else None)
    groups = [Group.from_bytes(r) for r in split_records((path / TRAINING / GROUPS).read_bytes())]
    return record["step"], record["state"], groups


def newest(run_dir: Path) -> Path | None:
    """The run's newest checkpoint whose files are all as they were written; says which ones are not."""
    for path in sorted(run_dir.glob("step_" + "[0-9]" * 6), reverse=True):
        if (path / MANIFEST).exists():
            fault = damage(path)
            if fault is None:
                return path
            print(f"checkpoint {path} is damaged ({fault}); taking the one before it", flush=True)
    return None


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint's files; None if they are as they were written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["digest"] != _digest_of(json.dumps(files, sort_keys=True).encode()):
            return f"{MANIFEST} does not fit its own checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error}"
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or not {size:,} bytes long"
        if _digest_file(file) != digest:
            return f"{name} does not fit its checksum"
    return None


def check_path(path: Path) -> Path:
    """The path of a checkpoint that was asked for. Raises UserError if it is none, or damaged."""
    if not (path / MANIFEST).exists():
        raise UserError(f"--resume-mode {path}: no checkpoint is there ({MANIFEST} is missing). Give a step_... directory.")
    if fault := damage(path):
        raise UserError(f"--resume-mode {path}: the checkpoint is damaged: {fault}. Take another, or --resume-mode auto.")
    return path


def _export_hf(learner: Learner, tokenizer: PreTrainedTokenizerBase, work: Path) -> None:
    """Weights in the model's own dtype, config, tokenizer and chat template, on rank 0; all ranks take part."""
    dtype = learner.config.dtype or torch.float32
    weights = {}
    for name, tensor in learner.weights():
        if learner.ranks.is_main:
            weights[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    if learner.ranks.is_main:
        learner.config.save_pretrained(work)
        learner.policy.model.generation_config.save_pretrained(work)
        tokenizer.save_pretrained(work)
        save_torch_state_dict(weights, work)  # in shards of 5 GB


def _write_manifest(work: Path) -> None:
    files = {}
    for file in sorted(p for p in work.rglob("*") if p.is_file()):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        files[str(file.relative_to(work))] = [file.stat().st_size, _digest_file(file)]
    record = {"files": files, "digest": _digest_of(json.dumps(files, sort_keys=True).encode())}
    with open(work / MANIFEST, "w") as handle:
        json.dump(record, handle)
        handle.flush()
        os.fsync(handle.fileno())


def _forget_old(run_dir: Path, keep: int) -> None:
    saved = sorted(run_dir.glob("step_" + "[0-9]" * 6))
    for path in saved[: len(saved) - keep] if keep else []:
        shutil.rmtree(path, ignore_errors=True)


def _digest_file(file: Path) -> str:
    state = xxhash.xxh3_128()
    with open(file, "rb") as handle:
        while chunk := handle.read(1 << 22):
            state.update(chunk)
    return state.hexdigest()


def _digest_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
