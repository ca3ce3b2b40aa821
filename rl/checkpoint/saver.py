"""Writes a run's checkpoints: in a directory next to their place, in the background, and renamed when complete, so that a kill
leaves the last good one. rl/checkpoint/resume.py describes their files, and reads them.

Memory: training continues while a checkpoint is written, so each learner holds a copy of the tensors that training changes,
its shards of the master weights and of AdamW's two moments: 12 bytes a parameter, from the first save on. All files are written
from that copy, a few pieces of PIECE_BYTES at a time. No copy is made for the last save, nor if memory is short: then training
waits.
"""

import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from transformers import PreTrainedTokenizerBase

from rl.adapters import files as adapter_files
from rl.background import in_background
from rl.checkpoint.best import Best
from rl.checkpoint.exports import Export, exports_of
from rl.checkpoint.manifest import GROUPS, STATE, STEPS, TRAINING, UNFINISHED, make_empty, remove, rename, write_manifest
from rl.checkpoint.resume import CheckpointArgs
from rl.checkpoint.shard_files import Files, header
from rl.errors import UserError
from rl.hub.tensor_writer import TensorFile, piece_sizes, pieces
from rl.learning.learner import Learner
from rl.model.pretrained import GENERATION
from rl.model.shards import Block, as_it_is, blocks_of_all_ranks, local
from rl.ranks import dist, host, launch, signals, watchdog
from rl.ranks.device import HOST_BACKEND
from rl.record.identity import Identity
from rl.record.run import Origin, Run
from rl.samples.group import Group
from rl.transport.records import join_records

if TYPE_CHECKING:
    from rl.data.image_prompts import ImagePrep

SPARE = 1.25  # a copy is made if this many times its size is free: the run itself may still grow


class Saver:
    """Saves on all learners together. `save` copies the tensors that training changes and returns; a thread writes them."""

    def __init__(
        self,
        args: CheckpointArgs,
        run: Run,
        identity: Identity,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        origin: Origin | None,
        prep: "ImagePrep | None" = None,
    ):
        """Renames checkpoints of later steps than the origin's, which the run will train again. A collective."""
        self.args, self.run, self.learner, self.tokenizer = args, run, learner, tokenizer
        self._identity = identity.record if learner.ranks.is_main else None
        self.run_dir = Path(dist.from_main(str(run.dir)))  # the first learner's counts
        self._own_disk = self._find_own_disk()  # the node's name, if it does not share the first one's
        # Whether this learner makes, renames and removes directories on its disk.
        self._clears = learner.ranks.is_main or bool(self._own_disk and launch.here().local_rank == 0)
        # A group of its own, so that the thread's messages do not mix with those of training.
        self._group = torch.distributed.new_group(backend=HOST_BACKEND) if learner.ranks.world_size > 1 else None
        self._exports = exports_of(learner)
        learner.policy.reshard()
        named = {f"{of.of}.{name}": learner.policy.model.get_parameter(name) for of in self._exports for name in of.names}
        self._blocks = blocks_of_all_ranks(named)
        # Frozen tensors are exported, too. FSDP keeps their memory in place.
        self._frozen = {key: local(parameter.data) for key, parameter in named.items() if not parameter.requires_grad}
        self._prep = prep
        self._places: dict[str, Block] = {}  # this learner's part of each tensor that training changes
        self._change = as_it_is  # adds adapters to the weights
        # Copies go into the same memory at every save: fresh memory costs a page fault every 4 KB.
        self._copies: dict[str, torch.Tensor] = {}
        self._state: dict[str, torch.Tensor] | None = None  # for the next save: the copies, or the tensors themselves
        self._was_short = False  # whether memory was short at some save
        self._leaving = False
        self._saving: Future | None = None  # the thread that writes a checkpoint
        self._moved = 0  # pieces that it has written or sent
        self.best = Best(self.run_dir, learner.ranks.is_main)
        self.step = origin.step if origin else 0  # the last step that was saved
        self.error = ""  # of the last save; empty if it succeeded
        signals.remains(str(origin.checkpoint) if origin and origin.checkpoint else None)
        if origin and self._clears:
            self._set_aside(after=origin.step)
        if origin:
            self.best.resume(after=origin.step)

    def save(self, step: int, state: dict, groups: Sequence[Group] = (), unfinished: Sequence[Group] = ()) -> None:
        """Begins to write the checkpoint of a step once the one before is complete. A collective of the learners. state: JSON;
        groups: samples not trained yet; unfinished: groups still being generated; both whole on the first learner. A checkpoint
        that cannot be written leaves nothing behind; training continues and `finish` reports it."""
        if self._state is None:
            self.copy(step)
        tensors = self._state
        self._state = None
        self.step = step
        target = self.run_dir / f"step_{step:06d}"
        work = target.with_name(f"{target.name}.partial")
        if error := self._first_error(lambda: make_empty(work), acts=self._clears):
            self._give_up(step, work, error)
            return
        ranks = dist.all_gather_values(self.learner.rank_state())
        record = {"step": step, "state": state, "learner": self.learner.state(), "identity": self._identity, "ranks": ranks}
        files = {}
        if self.learner.ranks.is_main:
            files = {
                STATE: json.dumps(record).encode(),
                GROUPS: join_records([group.to_bytes() for group in groups]),
                UNFINISHED: join_records([group.to_bytes() for group in unfinished]),
            }
        self._saving = in_background(lambda: self._complete(step, work, target, tensors, files), "save")
        if not self._is_last(step) and tensors is not self._copies:
            self.wait()  # before training changes them

    def copy(self, step: int) -> None:
        """The part of `save` that reads the weights, which may be called earlier: waits for the checkpoint before, then copies
        weights and moments if needed and possible. A collective of the learners."""
        self.wait()
        sharded = self.learner.state_tensors()
        self._places = self._places or {name: Block.of(tensor) for name, tensor in sharded.items()}
        self._state = live = {name: local(tensor) for name, tensor in sharded.items()}
        if not self._is_last(step) and self._has_room(live):
            for name, tensor in live.items():
                if name not in self._copies:
                    self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._copies[name].copy_(tensor)
            self._state = self._copies
        if adapters := self.learner.adapters:
            held, own = ({name: of[f"adapter.{name}"] for name in adapters.tensors} for of in (sharded, self._state))
            a = adapters.whole_a(held, self.learner.ranks.device)
            self._change = adapters.merge({name: tensor.cpu() for name, tensor in a.items()}, own)

    def wait(self) -> None:
        """Returns when the last save is complete, or has failed. Raises the thread's error if another learner has exited."""
        if not self._saving:
            return
        with watchdog.doing("the checkpoint before to be written"):
            while not self._saving.done():
                before = self._moved
                wait([self._saving], timeout=1.0)
                if self._moved > before:
                    watchdog.progress()
        self._saving.result()
        self._saving = None

    def finish(self, step: int) -> Path:
        """Waits for the checkpoint of that step, the last one, and returns it. Raises UserError if it could not be written."""
        self.wait()
        if self.error:
            newest = max(self.run_dir.glob(STEPS), default=None)
            again = f"with --resume-mode {newest}" if newest else "from the beginning, since no other checkpoint is there"
            raise UserError(
                f"--output-dir {self.run_dir.parent}: the last checkpoint, of step {step}, could not be written: {self.error}. "
                f"Make room, then run the same command again {again}."
            )
        return self.run_dir / f"step_{step:06d}"

    def save_last(self, step: int, save: Callable[[int], None]) -> Path | None:
        """Saves that step, after which nothing is trained, unless it is saved already, and waits for it. Returns the
        checkpoint; None if nothing was trained."""
        self._leaving = True
        if step > self.step:
            save(step)
        return self.finish(step) if step else None

    # ------------------------------------------------------------------------------------------- before the thread

    def _is_last(self, step: int) -> bool:
        """True if nothing changes the weights after this step's save."""
        return step >= self.run.total_steps or self._leaving

    def _has_room(self, live: dict[str, torch.Tensor]) -> bool:
        """True if every learner has the memory for its copies; otherwise prints a line, once. A collective."""
        missing = sum(tensor.nbytes for name, tensor in live.items() if name not in self._copies)
        reports = dist.all_gather_values([platform.node(), missing, host.available_memory()])
        for node in {node for node, _, _ in reports}:
            need = SPARE * sum(size for name, size, _ in reports if name == node)
            free = min(free for name, _, free in reports if name == node)
            if need > free:
                if not self._was_short:
                    self.run.say(
                        f"checkpoints: {node} has {free / 2**30:.1f} GB of memory free, too little for the copies that let "
                        f"training continue meanwhile ({need / 2**30:.1f} GB): each is written while training waits"
                    )
                self._was_short = True
                return False
        return True

    def _set_aside(self, after: int) -> None:
        for path in [*self.run_dir.glob("step_*.partial"), *self.run_dir.glob("step_*.removed")]:  # what a kill has left
            shutil.rmtree(path, ignore_errors=True)
        for path in self.run_dir.glob(STEPS):
            if int(path.name.removeprefix("step_")) > after:
                aside = path.with_name(f"{path.name}.superseded")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(path, aside)

    # ------------------------------------------------------------------------------------------------- the thread

    def _complete(self, step: int, work: Path, target: Path, tensors: dict, files: dict[str, bytes]) -> None:
        self.error = self._write(work, target, tensors, files)  # raises only if a collective does: another learner has exited
        if self.error:
            self._give_up(step, work, self.error)
        else:
            signals.remains(str(target))

    def _write(self, work: Path, target: Path, tensors: dict[str, torch.Tensor], files: dict[str, bytes]) -> str:
        """Writes the whole checkpoint. Returns the error of the first learner that has one, or "". A collective."""
        ranks = self.learner.ranks
        written = {}
        shard = f"{TRAINING}/shard-{ranks.rank + 1:05d}-of-{ranks.world_size:05d}.safetensors"
        error = _attempt(lambda: written.update({shard: self._write_shard(work / shard, tensors)}))
        reports = self._gather([written, self._own_disk, error])
        if error := next((error for *_, error in reports if error), ""):
            return error
        for export in self._exports:
            stream = self._stream(export, tensors | self._frozen)
            if ranks.is_main and not error:
                error = _attempt(lambda export=export, stream=stream: written.update(export.write(work, stream)))
            for _ in stream:
                pass  # even if writing failed, since the others still send
        if ranks.is_main and not error:
            error = _attempt(lambda: self._complete_files(work, files, written, reports))
        if error := self._gather(error)[0]:
            return error
        # The first learner renames last: its directory has the manifest, which makes the checkpoint complete.
        for is_turn in (self._clears and not ranks.is_main, ranks.is_main):
            if error := self._first_error(lambda: rename(work, target), acts=is_turn, group=self._group):
                return error
        saved = [path.name for path in sorted(self.run_dir.glob(STEPS))] if ranks.is_main else []
        old = saved[: -self.args.max_ckpt_to_keep] if self.args.max_ckpt_to_keep else []
        doomed = [self.run_dir / name for name in self._gather(old)[0]]
        with self.best.settled():
            for path in doomed:
                if self._clears and path.is_dir():
                    _attempt(lambda path=path: remove(path))
        return ""

    def _first_error(self, act: Callable[[], object], acts: bool, group: torch.distributed.ProcessGroup | None = None) -> str:
        """The error of the first learner for which the act fails, or "". acts: whether this learner acts. A collective."""
        return next(filter(None, dist.all_gather_values(_attempt(act) if acts else "", group)), "")

    def _find_own_disk(self) -> str:
        """This node's name if it does not share the first one's directory, or "". A collective. Raises UserError."""
        own = "" if dist.sees_main(self.run_dir) else platform.node()
        if error := self._first_error(lambda: self.run_dir.mkdir(parents=True, exist_ok=True), acts=bool(own)):
            raise UserError(
                f"--output-dir: a node that does not see what the first one writes into {self.run_dir.absolute()} cannot keep "
                f"its part of the checkpoints there: {error}. Give a directory that all share, or one on every node's disk."
            )
        if hosts := sorted({name for name in dist.all_gather_values(own) if name}):
            self.run.say(
                f"checkpoints: {', '.join(hosts)} does not share {self.run_dir.absolute()}: each node keeps its learners' part "
                "on its own disk, and all are needed to resume"
            )
        return own

    def _gather(self, value: Any) -> list:
        return dist.all_gather_values(value, self._group)

    def _write_shard(self, path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
        """This learner's part of the weights and moments, as torch reads it. Returns (size, checksum)."""
        file = TensorFile(path, [(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()], header(self._places))
        for tensor in tensors.values():
            for piece in pieces(tensor, tensor.dtype):
                file.write(piece)
                self._moved += 1
        return file.close()

    def _stream(self, export: Export, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """On the first learner, an export's whole tensors in its order, in pieces; others send their shards. A collective."""
        for name in export.names:
            key = f"{export.of}.{name}"
            for rank in sorted(range(len(self._blocks)), key=lambda rank, key=key: self._blocks[rank][key].offset):
                own = self._change(name, tensors[key]) if rank == self.learner.ranks.rank else None
                yield from self._stream_shard(rank, key, own, export.dtypes[name])

    def _stream_shard(self, rank: int, key: str, own: torch.Tensor | None, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """On the first learner, the part of a tensor that learner `rank` has and sends, `own`."""
        ranks = self.learner.ranks
        if rank == ranks.rank:
            for piece in pieces(own, dtype):
                self._moved += 1
                if ranks.is_main:
                    yield piece
                else:
                    torch.distributed.send(piece.view(torch.uint8), group=self._group, group_dst=0)
        elif ranks.is_main:
            for size in piece_sizes(math.prod(self._blocks[rank][key].shape), dtype):
                piece = torch.empty(size, dtype=dtype)
                torch.distributed.recv(piece.view(torch.uint8), group=self._group, group_src=rank)
                self._moved += 1
                yield piece

    def _complete_files(self, work: Path, files: dict[str, bytes], written: Files, reports: list) -> None:
        """Adds the small files and the manifest. reports: each learner's files, and its node if that has its own disk. Raises
        OSError if another learner's file is missing on this disk."""
        for of_rank, node, _ in reports:
            for name, (size, digest) in of_rank.items():
                if not node and (not (work / name).is_file() or (work / name).stat().st_size != size):
                    raise FileNotFoundError(
                        f"{work / name} is not there as its learner wrote it: all learners must see the same --output-dir"
                    )
                written[name] = (size, digest, node) if node else (size, digest)
        self.learner.config.save_pretrained(work)
        # save_pretrained would refuse what it has read, such as a temperature without do_sample.
        self.learner.policy.model.generation_config.to_json_file(work / GENERATION, keys_to_pop=["compile_config"])
        self.tokenizer.save_pretrained(work)
        if self._prep:
            self._prep.save(work)
        if adapters := self.learner.adapters:
            directory = work / adapter_files.DIRECTORY
            model = self.learner.policy.model
            adapter_files.write_config(directory, adapters.setting, adapters.names, model, self.learner.path)
        for name, content in files.items():
            (work / TRAINING / name).write_bytes(content)
        write_manifest(work, written)

    def _give_up(self, step: int, work: Path, error: str) -> None:
        self.error = error
        if self._clears:
            shutil.rmtree(work, ignore_errors=True)
        if self.learner.ranks.is_main:
            print(f"warning: the checkpoint of step {step} could not be written: {error}. Training continues.", file=sys.stderr)


def _attempt(act: Callable[[], object]) -> str:
    """Makes the call. Returns its error on one line, or ""."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
