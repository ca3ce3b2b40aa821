"""Checkpoints: everything a run needs to go on as if it had never stopped, beside the model as a Hugging Face directory.

    runs/<name>/step_000020/            config, tokenizer, weights: AutoModelForCausalLM.from_pretrained loads it
    runs/<name>/step_000020/training/   master weights and optimizer moments, a file a learner; state.json; groups
    runs/<name>/step_000020/manifest.json   every file's size and checksum
    runs/<name>/best/                   the same Hugging Face files, of the saved step that validated best (links)

A checkpoint is written beside its place, in the background, and renamed: a kill leaves the last good one. The manifest is
checked before anything is loaded. torch.distributed.checkpoint writes the tensors, as safetensors: nothing on disk is pickled,
and another number of learners can read them. All learners must see the same file system.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
import xxhash
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import PreTrainedTokenizerBase

from rl import dist, watchdog
from rl.batch import Group, join_records, split_records
from rl.errors import Stopped, UserError
from rl.learner import Learner
from rl.run import Origin

MANIFEST, TRAINING, STATE = "manifest.json", "training", "state.json"
GROUPS, UNFINISHED = "groups.bin", "unfinished.bin"
STEPS = "step_" + "[0-9]" * 6
# A run cannot go on under other values: the order of the prompts and the counting of versions hang on these.
FIXED = ("seed", "shuffle", "ppo_mini_batch_size", "require_batches", "trigger_parameter_sync_step")


@dataclass
class CheckpointArgs:
    save_freq: int = 0
    """Save a checkpoint every so many steps; there is always one after the last."""
    max_ckpt_to_keep: int = 3
    """Checkpoints to keep of a run, the newest ones; 0 keeps all. The best by validation stays besides."""
    resume_mode: str = "auto"
    """auto goes on where the run --experiment-name stopped; disable starts anew; or the path of a checkpoint. After a restart
    by torchrun the job goes on with its own run in any case."""


def find(args: CheckpointArgs, output_dir: str, experiment_name: str | None) -> Origin | None:
    """Where the run goes on from, the same on every rank; None to start anew. Raises UserError if the checkpoint that was asked
    for cannot be used. A collective."""
    found = _find(args, Path(output_dir), experiment_name) if torch.distributed.get_rank() == 0 else None
    text = dist.from_main(json.dumps([str(found.run_dir), str(found.checkpoint or "")]) if found else "")
    if not text:
        return None
    run_dir, checkpoint = json.loads(text)
    return Origin(Path(run_dir), Path(checkpoint) if checkpoint else None)


def _find(args: CheckpointArgs, output_dir: Path, experiment_name: str | None) -> Origin | None:
    runs = []
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):  # this job's own run, wherever it began
        configs = sorted(output_dir.glob("*/config*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        runs = [path.parent for path in configs if json.loads(path.read_text()).get("job") == dist.job()][:1]
    if not runs and args.resume_mode == "disable":
        return None
    if not runs and args.resume_mode != "auto":
        path = check_path(Path(args.resume_mode))
        return Origin(path.parent, path)
    if not runs and experiment_name:
        runs = [output_dir / experiment_name]
    for run_dir in runs:
        if (run_dir / "config.json").exists():
            return Origin(run_dir, newest(run_dir))
    return None


def load(origin: Origin, learner: Learner, args: CheckpointArgs, script: str) -> tuple[dict, list[Group], list[Group]]:
    """Brings the learner to where the checkpoint was written; returns (state, groups, unfinished groups) as they were saved.
    Raises UserError if it is of another script, or of other flags than a run can go on with. A collective."""
    path = origin.checkpoint
    record = json.loads((path / TRAINING / STATE).read_text())
    now = _fixed(args, script)
    for name, value in record["fixed"].items():
        if name in now and now[name] != value:
            what = "by the script" if name == "script" else f"with --{name.replace('_', '-')}"
            raise UserError(
                f"{path} was written {what} {value}, now it is {now[name]}. Go on with what it was, or start anew with "
                "--resume-mode disable."
            )
    tensors = learner.state_tensors()
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path / TRAINING)))
    except (dcp.CheckpointException, RuntimeError, ValueError) as error:
        reason = _root(error)
        raise UserError(f"{path} does not fit the model: {reason}. Give the --model that it was trained from.") from error
    ranks = record["ranks"]
    learner.restore(record["learner"], ranks[learner.ranks.rank] if learner.ranks.rank < len(ranks) else None)
    return record["state"], read_groups(path / TRAINING / GROUPS), read_groups(path / TRAINING / UNFINISHED)


class Saver:
    """Writes a run's checkpoints. `save` copies what changes, on all learners together, and returns; the rest is done by a
    thread while training goes on."""

    def __init__(
        self,
        args: CheckpointArgs,
        run_dir: Path,
        script: str,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        origin: Origin | None,
    ):
        """run_dir: the first learner's counts. Checkpoints of later steps than the origin's, of a future that will not be, are
        renamed. A collective."""
        self.args, self.learner, self.tokenizer, self.script = args, learner, tokenizer, script
        self.run_dir = Path(dist.from_main(str(run_dir)))
        # A group of its own: what the thread sends must not meet what training sends.
        self._group = torch.distributed.new_group(backend="gloo") if learner.ranks.world_size > 1 else None
        # Copies go into the same memory at every save: fresh memory costs a page fault every 4 KB.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._state: dict[str, torch.Tensor] | None = None  # of this learner: its shards of weights and moments
        self._weights: dict[str, torch.Tensor] = {}  # whole, in the model's own precision, on the first learner
        self._thread: threading.Thread | None = None
        self._scores: dict[int, float] = {}  # validation by step
        self.step = origin.step if origin else 0  # that was saved last
        self.fault = ""  # of the last save; empty if it is whole
        if origin and learner.ranks.is_main:
            for path in [*self.run_dir.glob("*.partial"), *self.run_dir.glob("*.removed")]:  # what a kill has left
                shutil.rmtree(path, ignore_errors=True)
            for path in self.run_dir.glob(STEPS):
                if int(path.name.removeprefix("step_")) > origin.step:
                    aside = path.with_name(f"{path.name}.superseded")
                    shutil.rmtree(aside, ignore_errors=True)
                    os.rename(path, aside)

    def save(self, step: int, state: dict, groups: Sequence[Group] = (), unfinished: Sequence[Group] = ()) -> None:
        """Begins to write the checkpoint of a step, when the one before is complete. A collective of the learners.

        state: anything that JSON can hold; groups: samples that have come in and are not trained yet; unfinished: what is still
        being generated. A checkpoint that cannot be written (disk full, no permission) leaves nothing behind; training goes
        on and `finish` tells.
        """
        if self._state is None:
            self.copy()
        tensors, self._state = self._state, None
        self.step = step
        target = self.run_dir / f"step_{step:06d}"
        work = target.with_name(f"{target.name}.partial")
        fault = _attempt(lambda: _make_anew(work)) if self.learner.ranks.is_main else ""
        if fault := dist.from_main(fault):
            self._give_up(step, work, fault)
            return
        ranks = dist.all_gather_bytes(json.dumps(self.learner.rank_state()).encode())
        record = {"step": step, "state": state, "fixed": _fixed(self.args, self.script), "learner": self.learner.state()}
        record["ranks"] = [json.loads(rank) for rank in ranks]
        files = {
            STATE: json.dumps(record).encode(),
            GROUPS: join_records([group.to_bytes() for group in groups]),
            UNFINISHED: join_records([group.to_bytes() for group in unfinished]),
        }
        arguments = (step, work, target, tensors, files)
        self._thread = threading.Thread(target=self._complete, args=arguments, daemon=True)
        self._thread.start()

    def copy(self) -> None:
        """What `save` begins with, if it has not been done: copies weights and moments, when the checkpoint before is
        complete. Training may change them from then on. A collective of the learners."""
        self.wait()
        dtype = self.learner.config.dtype or torch.float32
        for name, tensor in self.learner.weights():
            if self.learner.ranks.is_main:
                if name not in self._weights:
                    self._weights[name] = torch.empty(tensor.shape, dtype=dtype)
                self._weights[name].copy_(tensor)
        self._state = self._stager.stage(self.learner.state_tensors())

    def wait(self) -> None:
        """Until the last save is complete, or has failed."""
        if self._thread:
            with watchdog.doing("the checkpoint before to be written"):
                self._thread.join()
            self._thread = None

    def finish(self, step: int) -> Path:
        """Waits; returns the checkpoint of that step, the last one. Raises UserError if it could not be written."""
        self.wait()
        if self.fault:
            raise UserError(
                f"--output-dir {self.run_dir.parent}: the last checkpoint, of step {step}, could not be written: {self.fault}. "
                f"Make room, then run the same command again with --resume-mode pointing to {self.run_dir}/step_..., "
                "the newest that is there."
            )
        return self.run_dir / f"step_{step:06d}"

    def leave(self, step: int, save: Callable[[int], None]) -> NoReturn:
        """After SIGTERM: has that step saved if it is not yet, waits for it, and raises Stopped."""
        if step > self.step:
            save(step)
        kept = f"it goes on from {self.finish(step)}" if step else "nothing was trained yet"
        raise Stopped(f"SIGTERM: stopped after step {step}; {kept}" if self.learner.ranks.is_main else "")

    def validated(self, metrics: dict[str, float]) -> None:
        """Tells how the weights after training/validated_step did: of the saved steps the best is kept as `best`."""
        scores = [value for name, value in metrics.items() if name.startswith("val-core/") and "/acc/mean@" in name]
        if scores:
            self._scores[metrics["training/validated_step"]] = sum(scores) / len(scores)
            if not self._thread:
                self._keep_best()

    def _complete(self, step: int, work: Path, target: Path, tensors: dict, files: dict[str, bytes]) -> None:
        writer = dcp.HuggingFaceStorageWriter(str(work / TRAINING), save_distributed=True)
        fault = _attempt(lambda: dcp.save(tensors, storage_writer=writer, process_group=self._group))
        if self.learner.ranks.is_main and not fault:
            fault = _attempt(lambda: self._export(work, target, files))
        try:
            faults = [record.decode() for record in dist.all_gather_bytes(fault.encode(), self._group)]
        except RuntimeError as error:  # another learner is gone: the job is at its end
            faults = [_root(error)]
        self.fault = next(filter(None, faults), "")
        if self.fault:
            self._give_up(step, work, self.fault)
        else:
            self._keep_best()

    def _export(self, work: Path, target: Path, files: dict[str, bytes]) -> None:
        self.learner.config.save_pretrained(work)
        self.learner.policy.model.generation_config.save_pretrained(work)
        self.tokenizer.save_pretrained(work)
        save_torch_state_dict(self._weights, work)  # in shards of 5 GB
        for name, content in files.items():
            (work / TRAINING / name).write_bytes(content)
        _write_manifest(work)
        if target.exists():  # of a run that went on from an older checkpoint
            _remove(target)
        os.rename(work, target)
        _sync_directory(self.run_dir)
        saved = sorted(self.run_dir.glob(STEPS))
        for path in saved[: -self.args.max_ckpt_to_keep] if self.args.max_ckpt_to_keep else []:
            _remove(path)

    def _give_up(self, step: int, work: Path, fault: str) -> None:
        self.fault = fault
        if self.learner.ranks.is_main:
            shutil.rmtree(work, ignore_errors=True)
            print(f"warning: the checkpoint of step {step} could not be written: {fault}. Training goes on.", file=sys.stderr)

    def _keep_best(self) -> None:
        """Links the Hugging Face files of the best saved step into `best`."""
        if not self.learner.ranks.is_main:
            return
        best, record = self.run_dir / "best", {"score": -1.0}
        with contextlib.suppress(OSError, ValueError):
            record = json.loads((best / "best.json").read_text())
        for step, score in self._scores.items():
            source = self.run_dir / f"step_{step:06d}"
            if score > record["score"] and (source / MANIFEST).exists():
                record = {"step": step, "score": score}
                _attempt(lambda source=source, record=record: _link_best(source, best, record))


def newest(run_dir: Path) -> Path | None:
    """The run's newest checkpoint whose files are all as they were written; says which ones are not."""
    for path in sorted(run_dir.glob(STEPS), reverse=True):
        fault = damage(path)
        if fault is None:
            return path
        print(f"warning: checkpoint {path} is damaged ({fault}); the one before it is taken", file=sys.stderr, flush=True)
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
    return path.resolve()


def _fixed(args: CheckpointArgs, script: str) -> dict:
    flags = asdict(args)
    names = FIXED if "trigger_parameter_sync_step" in flags else ("seed", "shuffle")
    return {"script": script} | {name: flags[name] for name in names}


def _attempt(act: Callable[[], object]) -> str:
    """Does it; returns what went wrong, or ""."""
    try:
        act()
    except (Exception, dcp.CheckpointException) as error:  # that one is no Exception
        return _root(error)
    return ""


def _root(error: BaseException) -> str:
    """One line on an error; of torch.distributed.checkpoint's, which gather every rank's with its traceback, the first."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def read_groups(file: Path) -> list[Group]:
    """The groups in GROUPS or UNFINISHED."""
    return [Group.from_bytes(record) for record in split_records(file.read_bytes())]


def _make_anew(work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    (work / TRAINING).mkdir(parents=True)


def _remove(path: Path) -> None:
    """Takes the name away first: what is left by a kill is no checkpoint any more."""
    doomed = path.with_name(f"{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _link_best(source: Path, best: Path, record: dict) -> None:
    work = best.with_name("best.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.name != MANIFEST:
            try:
                os.link(file, work / file.name)
            except OSError:  # a file system without links
                shutil.copyfile(file, work / file.name)
    (work / "best.json").write_text(json.dumps(record))
    if best.exists():
        _remove(best)
    os.rename(work, best)


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
    _sync_directory(work)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest_file(file: Path) -> str:
    state = xxhash.xxh3_128()
    with open(file, "rb") as handle:
        while chunk := handle.read(1 << 22):
            state.update(chunk)
    return state.hexdigest()


def _digest_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
