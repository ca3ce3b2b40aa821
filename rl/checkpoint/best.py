"""`best` in a run's directory: the Hugging Face files of the saved step that validated best, as links, which take no room.

best/best.json has its step and score. `best` outlives its checkpoint: --max-ckpt-to-keep removes no weights that `best` holds.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from rl.checkpoint.manifest import MANIFEST, TRAINING, remove
from rl.record import validations


class Best:
    """Keeps `best` up to date. Scores arrive in the main thread, checkpoints in the saver's."""

    def __init__(self, run_dir: Path, is_main: bool):
        """is_main: other ranks keep nothing."""
        self.run_dir = run_dir
        self.path = run_dir / "best"
        self.is_main = is_main
        self._scores: dict[int, float] = {}  # by step
        self._lock = threading.RLock()

    def resume(self, after: int) -> None:
        """For a run that resumes after that step, once checkpoints of later steps have been renamed: renames a `best` of a
        later step, too, and chooses among the remaining checkpoints by the validations that the run has recorded."""
        if not self.is_main:
            return
        work = self.path.with_name("best.partial")
        if not self.path.exists() and (work / "best.json").exists():  # a kill between removing the old one and renaming
            os.rename(work, self.path)
        for left in (work, self.path.with_name("best.removed")):
            shutil.rmtree(left, ignore_errors=True)
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
        """Links the best of the saved steps, the earliest of equal ones, if it is better than `best`. Warns if that fails."""
        if not self.is_main:
            return
        with self._lock:
            saved = [(score, -step) for step, score in self._scores.items() if (self._source(step) / MANIFEST).exists()]
            score, step = max(saved, default=(-math.inf, 0))
            if score <= self._kept().get("score", -math.inf):
                return
            try:
                self._link({"step": -step, "score": score})
            except Exception as error:
                reason = f"{error!s:.400}"  # copytree lists every file
                print(
                    f"warning: step {-step} validated best ({score:.4g}), but {self.path} could not be written: {reason}. "
                    "Make room, or check its permissions: the next validation or checkpoint tries again.",
                    file=sys.stderr,
                    flush=True,
                )

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
            ignored = shutil.ignore_patterns(TRAINING, MANIFEST)
            shutil.copytree(self._source(record["step"]), work, ignore=ignored, copy_function=_link_or_copy)
            (work / "best.json").write_text(json.dumps(record))
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        if self.path.exists():
            remove(self.path)
        os.rename(work, self.path)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)  # a file system without links
