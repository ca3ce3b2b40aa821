"""Which checkpoints stay: the newest ones, and the best one by validation, to which `best` in the run's directory links.

best/best.json has the best one's step and score.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
from pathlib import Path

from rl.checkpoint.files import checkpoints, hidden, step_of
from rl.record import validations


class Best:
    """Keeps `best` up to date, by the record of validations. Those arrive in the main thread, checkpoints in the saver's."""

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
                        _remove(path)

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


def _remove(checkpoint: Path) -> None:
    """Rename the checkpoint first, so that a kill leaves nothing that looks like one."""
    os.rename(checkpoint, hidden(checkpoint))
    shutil.rmtree(hidden(checkpoint))
