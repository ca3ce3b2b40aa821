"""`best` in a run's directory: the Hugging Face files of the saved step that validated best, as links, which take no room.

best/best.json has its step and score. `best` outlives its checkpoint: --max-ckpt-to-keep removes no weights that `best` holds.
"""

import contextlib
import errno
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from rl.adapters.files import DIRECTORY
from rl.checkpoint.manifest import MANIFEST, remove
from rl.record import validations

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}  # errors of a link after which there is no room for a copy either


class Best:
    """Keeps `best` up to date. Scores arrive in the main thread, checkpoints in the saver's."""

    def __init__(self, run_dir: Path, is_main: bool):
        """is_main: other ranks keep nothing."""
        self.run_dir = run_dir
        self.is_main = is_main
        self._scores: dict[int, float] = {}  # by step
        self._lock = threading.RLock()
        self._warned = ""  # the last warning: a disk that stays full is reported once

    @property
    def path(self) -> Path:
        return self.run_dir / "best"

    def resume(self, after: int) -> None:
        """For a run that resumes after that step, once checkpoints of later steps have been renamed: sets `best` aside if it is
        of a later step, and chooses among the remaining checkpoints by the validations that the run has recorded."""
        if not self.is_main:
            return
        work = self.path.with_name("best.partial")
        if not self.path.exists() and (work / "best.json").exists():  # a kill between removing the old one and renaming
            os.rename(work, self.path)
        for path in (work, self.path.with_name("best.removed")):
            shutil.rmtree(path, ignore_errors=True)
        if self._kept().get("step", 0) > after:
            aside = self.path.with_name("best.superseded")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.path, aside)
        self._scores = validations.scores(row for row in validations.read(self.run_dir) if row["step"] <= after)
        self.keep()

    def scored(self, step: int, score: float) -> None:
        """Takes the validation score of the weights after that step."""
        with self._lock:
            self._scores[step] = score
            self.keep()

    def keep(self) -> None:
        """Links the best of the saved steps if it is better than `best`. Of equal steps the earliest counts. If linking fails,
        a warning says why, and the next call tries again."""
        if not self.is_main:
            return
        with self._lock:
            saved = [(score, -step) for step, score in self._scores.items() if (self._source(step) / MANIFEST).exists()]
            score, step = max(saved, default=(-math.inf, 0))
            if score <= self._kept().get("score", -math.inf):
                return
            try:
                self._link({"step": -step, "score": score})
                self._warned = ""
            except Exception as error:
                self._warn(f"step {-step} validated best ({score:.4g}), but {self.path} could not be written: {error}")

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, old checkpoints may be removed: the best one is linked, and nothing is being linked."""
        with self._lock:
            self.keep()
            yield

    def _source(self, step: int) -> Path:
        return self.run_dir / f"step_{step:06d}"

    def _kept(self) -> dict:
        """The content of best.json; empty if it is missing or damaged."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads((self.path / "best.json").read_text())
            return {"step": int(record["step"]), "score": float(record["score"])}
        return {}

    def _link(self, record: dict) -> None:
        work = self.path.with_name("best.partial")
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir()
            source = self._source(record["step"])
            for file in (*source.iterdir(), *(source / DIRECTORY).glob("*")):
                if file.is_file() and file.name != MANIFEST:
                    (work / file.relative_to(source)).parent.mkdir(exist_ok=True)
                    _link_or_copy(file, work / file.relative_to(source))
            (work / "best.json").write_text(json.dumps(record))
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        if self.path.exists():
            remove(self.path)
        os.rename(work, self.path)

    def _warn(self, text: str) -> None:
        if text != self._warned:
            remedy = "Make room, or check its permissions: the next validation or checkpoint tries again."
            print(f"warning: {text}. {remedy}", file=sys.stderr, flush=True)
        self._warned = text


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        shutil.copyfile(source, target)  # a file system without links
