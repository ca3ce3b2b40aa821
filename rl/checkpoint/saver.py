"""Writes a run's checkpoints in the background. Each is written into a hidden directory, which is renamed when it is complete,
so that a kill at any instruction leaves the checkpoint before. rl/checkpoint/files.py describes the files.

Training continues meanwhile, so learners first copy their shards of what training changes to host memory, 12 bytes a parameter
in all. If memory is short, nothing is copied, and training waits. The first learner then makes the model's files of the shards'
files, and of --model where training changes nothing. Files are written by safetensors, which needs no memory; the writer of
torch.distributed.checkpoint, which reads them, would hold each file in memory twice more.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import torch
import torch.distributed
from safetensors.torch import save_file

from rl.background import in_background
from rl.checkpoint import files
from rl.checkpoint.files import checkpoints, hidden, read_tensors, step_of
from rl.data.job import Job
from rl.errors import UserError
from rl.hub import INDEX, on_hub
from rl.learning.learner import Learner
from rl.model.attention import dtype_of
from rl.model.loading import open_weights
from rl.model.pretrained import GENERATION
from rl.ranks import dist, host, launch, watchdog
from rl.ranks.device import HOST_BACKEND
from rl.ranks.shards import Block, as_it_is, in_parts, local
from rl.record import validations
from rl.record.run import Origin, Run
from rl.samples.group import Group, join_records

SPARE = 1.25  # copies are made if this many times their size is free: the run itself may still grow
FILE_BYTES = 5 << 30  # of a file's tensors
READ_BYTES = 256 << 20  # of tensors that are read at once
Tensors = Iterable[tuple[str, torch.Tensor]]


class Saver:
    """Saves on all learners together. `save` copies what is to be written and returns; a thread writes it."""

    def __init__(self, args, job: Job, run: Run, identity: dict | None, learner: Learner, origin: Origin | None):
        """Rename checkpoints of steps after the origin, which come again. Raise UserError if not all nodes see the run's
        directory. A collective."""
        self.args, self.job, self.run, self._identity, self.learner = args, job, run, identity, learner
        self.run_dir = Path(dist.from_main(str(run.dir)))  # the first learner's counts
        if not all(dist.all_gather_values(dist.sees_main(self.run_dir))):
            raise UserError(
                f"--output-dir: not all nodes see {self.run_dir.absolute()}. Give a directory that all nodes share."
            )
        # A group of its own, so that the thread's messages do not mix with those of training.
        self._group = torch.distributed.new_group(backend=HOST_BACKEND) if learner.ranks.world_size > 1 else None
        config = learner.config
        self._dtype = config.dtype or config.get_text_config().dtype or torch.float32  # of the model's files
        # Copies go into the same memory at every save: fresh memory costs a page fault every 4 KB.
        self._copies: dict[str, torch.Tensor] = {}
        self._next: dict[str, torch.Tensor] | None = None  # the shards of the next save
        self._waits = False  # whether training waits while the next save is written
        self._saving: Future | None = None  # the thread that writes a checkpoint
        self._files = 0  # that it has written
        self.best = Best(self.run_dir, learner.ranks.is_main)
        self.step = origin.step if origin else 0  # the last step that was saved
        self.error = ""  # of the last save; empty if it succeeded
        if origin and learner.ranks.is_main:
            self._set_aside(after=origin.step)
            self.best.update()

    def save(self, step: int, state: dict, groups: Sequence[Group] = (), unfinished: Sequence[Group] = ()) -> None:
        """Begin to write the checkpoint of a step once the one before is complete. A collective of the learners. state: JSON;
        groups: samples not trained yet; unfinished: groups still being generated; both whole on the first learner. A checkpoint
        that cannot be written leaves nothing behind; training continues and `finish` reports it."""
        if self._next is None:
            self.copy()
        shards, self._next = self._next, None
        self.step = step
        ranks = dist.all_gather_values(self.learner.rank_state())
        record = {"layout": files.LAYOUT, "step": step, "state": state, "learner": self.learner.state(), "ranks": ranks}
        small = {files.STATE: json.dumps(record | {"identity": self._identity}).encode()}
        for name, of in ((files.GROUPS, groups), (files.UNFINISHED, unfinished)):
            small[name] = join_records([group.to_bytes() for group in of])
        if self._waits:
            self._complete(step, shards, small)
        else:
            self._saving = in_background(lambda: self._complete(step, shards, small), "save")

    def copy(self) -> None:
        """The part of `save` that reads the weights, which may be called earlier: wait for the checkpoint before, then copy
        weights and moments if memory allows. A collective of the learners."""
        self.wait()
        sharded = self.learner.state_tensors()
        self._offsets = {name: Block.of(tensor).offset for name, tensor in sharded.items()}
        shards = {name: local(tensor) for name, tensor in sharded.items()}
        self._waits = not self._has_room(sum(tensor.nbytes for tensor in shards.values()))
        if not self._waits:
            for name, tensor in shards.items():
                if name not in self._copies:
                    self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._copies[name].copy_(tensor)
            shards = self._copies
        self._next = shards

    def wait(self) -> None:
        """Return when the last save is complete, or has failed. Raise the thread's error if another learner has exited."""
        if not self._saving:
            return
        while not self._saving.done():
            before = self._files
            wait([self._saving], timeout=1.0)
            if self._files > before:
                watchdog.progress()
        self._saving.result()
        self._saving = None

    def finish(self, step: int) -> Path:
        """Wait for the checkpoint of that step, the last one, and return it. Raise UserError if it could not be written."""
        self.wait()
        if self.error:
            raise UserError(
                f"--output-dir {self.run_dir.parent}: the last checkpoint, of step {step}, could not be written: {self.error}. "
                "Make room, then run the same command again: it resumes from the newest checkpoint."
            )
        return self.run_dir / f"step_{step:06d}"

    # ------------------------------------------------------------------------------------------- before the thread

    def _has_room(self, shards: int) -> bool:
        """Return whether all learners have memory for copies, else print a line. shards: bytes of this one's. A collective."""
        if self._copies:
            return True
        learners = min(launch.here().local_world_size, self.learner.ranks.world_size)  # at most, of this node
        need = SPARE * learners * shards
        short = any(dist.all_gather_values(need > host.available_memory()))
        if short and not self._waits:
            self.run.say(f"checkpoints: {need / 2**30:.1f} GB for copies are not free: training waits while each is written")
        return not short

    def _set_aside(self, after: int) -> None:
        for left in self.run_dir.glob(f".{files.STEPS}"):  # what a kill has left
            shutil.rmtree(left, ignore_errors=True)
        for path in self.run_dir.glob(files.STEPS):
            if step_of(path) > after:
                aside = path.with_name(f"{path.name}.superseded")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(path, aside)

    # ------------------------------------------------------------------------------------------------- the thread

    def _complete(self, step: int, shards: dict[str, torch.Tensor], small: dict[str, bytes]) -> None:
        """Write the whole checkpoint, and rename it. Raises only if a collective does: another learner has exited."""
        target = self.run_dir / f"step_{step:06d}"
        work = hidden(target)
        ranks = self.learner.ranks
        stem = work / files.TRAINING / f"shard-{ranks.rank + 1:05d}-of-{ranks.world_size:05d}"
        self.error = self._first_error(lambda: stem.parent.mkdir(parents=True, exist_ok=True), acts=ranks.is_main)
        self.error = self.error or self._first_error(lambda: self._write_shards(stem, shards))
        self.error = self.error or self._first_error(lambda: self._finish(work, target, small), acts=ranks.is_main)
        if self.error and ranks.is_main:
            shutil.rmtree(work, ignore_errors=True)
            print(
                f"warning: the checkpoint of step {step} could not be written: {self.error}. Training continues.",
                file=sys.stderr,
            )

    def _first_error(self, act: Callable[[], object], acts: bool = True) -> str:
        """Return the first learner's error of the act, in a line, or "". acts: whether this learner acts. A collective."""
        error = ""
        try:
            if acts:
                act()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return next(filter(None, dist.all_gather_values(error, self._group)), "")

    def _write_shards(self, stem: Path, shards: dict[str, torch.Tensor]) -> None:
        def places(names: Iterable[str]) -> dict[str, str]:
            """The header by which torch.distributed.checkpoint.HuggingFaceStorageReader finds the tensors' parts."""
            offsets = {name: {"saved_offsets": self._offsets[name]} for name in names}
            return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}

        self._write_files(stem, ((name, tensor) for name, tensor in shards.items() if tensor.numel()), places)

    def _finish(self, work: Path, target: Path, small: dict[str, bytes]) -> None:
        """Once all shards are written: write all other files, bring them to disk, rename the checkpoint, and make room."""
        self._write_model(work)
        self._write_small(work, small)
        for path in sorted(work.rglob("*"), reverse=True):  # directories after their files
            _to_disk(path)
        _to_disk(work)
        os.rename(work, target)
        _to_disk(self.run_dir)
        self.best.prune(self.args.checkpoint.max_ckpt_to_keep)

    def _write_model(self, work: Path) -> None:
        """Write the adapters, if any, and the model with these added, whole and under the hub's names."""
        change = self._write_adapter(work) if self.learner.adapters else as_it_is

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._whole(work):
                tensor = change(name, tensor).to(dtype_of(name, self._dtype))
                yield from on_hub(self.learner.policy.model, name, tensor).items()

        written = self._write_files(work / "model", named(), lambda _: {"format": "pt"})
        if len(written) > 1:
            names = [f"model-{number:05d}-of-{len(written):05d}.safetensors" for number in range(1, len(written) + 1)]
            for (file, _), name in zip(written, names, strict=True):
                file.rename(work / name)
            index = {part: name for (_, parts), name in zip(written, names, strict=True) for part in parts}
            size = sum((work / name).stat().st_size for name in names)
            (work / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2))

    def _whole(self, work: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of the model's parameters without adapters."""
        named = self.learner.parameters
        trained = {name: f"model.{name}" for name in named if f"model.{name}" in self._offsets}
        shapes = ((name, torch.empty(named[name].shape, device="meta", dtype=dtype_of(name, self._dtype))) for name in trained)
        for part in in_parts(shapes, READ_BYTES):
            whole = {name: torch.empty_like(tensor, device="cpu") for name, tensor in part.items()}
            read_tensors(work, {trained[name]: tensor for name, tensor in whole.items()})
            yield from whole.items()
        if frozen := [name for name in named if name not in trained]:
            weights = open_weights(self.learner.path, self.args.trust_remote_code, say=False)
            yield from ((name, weights.whole(name)) for name in frozen)

    def _write_adapter(self, work: Path) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Write the adapters in peft's format. Return a function that adds them: (name, weight) -> weight."""
        adapters = self.learner.adapters
        model = self.learner.policy.model
        whole = {name: torch.empty(model.get_parameter(name).shape) for name in adapters.tensors}
        read_tensors(work, {f"adapter.{name}": tensor for name, tensor in whole.items()})
        adapters.save(work / "adapter", whole, model, self.learner.path)
        return adapters.merge(whole, whole)

    def _write_small(self, work: Path, small: dict[str, bytes]) -> None:
        self.learner.config.save_pretrained(work)
        # save_pretrained would refuse what it has read, such as a temperature without do_sample.
        self.learner.policy.model.generation_config.to_json_file(work / GENERATION, keys_to_pop=["compile_config"])
        self.job.tokenizer.save_pretrained(work)
        if prep := self.job.prompts.prep:
            prep.save(work)
        for name, content in small.items():
            (work / files.TRAINING / name).write_bytes(content)

    def _write_files(self, stem: Path, tensors: Tensors, header: Callable) -> list[tuple[Path, list[str]]]:
        """Write files of up to FILE_BYTES. Return each with the names of its tensors. header: names -> a file's metadata."""
        out = []
        contiguous = ((name, tensor.contiguous()) for name, tensor in tensors)
        for number, named in enumerate(in_parts(contiguous, FILE_BYTES)):
            file = stem.with_name(f"{stem.name}{f'-{number}' * bool(number)}.safetensors")
            save_file(named, file, header(named))
            _to_disk(file)
            out.append((file, list(named)))
            self._files += 1
        return out


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Best:
    """Decides which checkpoints stay: the newest ones, and the best one by validation, to which `best` in the run's directory
    links. best/best.json has its step and score. Validations arrive in the main thread, checkpoints in the saver's."""

    def __init__(self, run_dir: Path, is_main: bool):
        """is_main: other learners keep nothing."""
        self.run_dir = run_dir
        self.is_main = is_main
        self.link = run_dir / "best"
        self._lock = threading.RLock()

    def update(self) -> Path | None:
        """Link the best of the saved steps, the earliest of equal ones; return it. Warn if that fails."""
        if not self.is_main:
            return None
        with self._lock:
            scores = validations.scores(validations.read(self.run_dir))
            saved = [path for path in checkpoints(self.run_dir) if step_of(path) in scores]
            best = max(saved, key=lambda path: scores[step_of(path)], default=None)
            try:
                self._link(best, scores)
            except OSError as error:
                print(f"warning: {self.link} could not be written: {error}. It is tried again.", file=sys.stderr, flush=True)
            return best

    def prune(self, newest: int) -> None:
        """Remove all checkpoints but the newest ones and the best; 0 keeps all."""
        with self._lock:
            best = self.update()
            for path in checkpoints(self.run_dir)[:-newest] if newest else []:
                if path != best:
                    with contextlib.suppress(OSError):
                        os.rename(path, hidden(path))  # first, so that a kill leaves nothing that looks like a checkpoint
                        shutil.rmtree(hidden(path))

    def _link(self, best: Path | None, scores: dict[int, float]) -> None:
        if self.link.is_dir() and not self.link.is_symlink():  # a copied run's
            shutil.rmtree(self.link)
        if best is None:
            self.link.unlink(missing_ok=True)
        elif not self.link.is_symlink() or os.readlink(self.link) != best.name:
            (best / "best.json").write_text(json.dumps({"step": step_of(best), "score": scores[step_of(best)]}))
            new = self.run_dir / ".best"
            new.unlink(missing_ok=True)
            new.symlink_to(best.name)
            os.replace(new, self.link)
