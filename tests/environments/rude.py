"""Environments that behave badly, and some that do not, for the tests of their processes."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

DRAWN = []
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
helper = subprocess.Popen(SLEEP, start_new_session=True)  # a server for all episodes


class Rude:
    """What the row's ground truth names is done in the first step."""

    tools = ()

    def reset(self, row, seed):
        self.what, self.seed, self.steps = row["ground_truth"], seed, 0
        print("an environment prints", flush=True)
        if self.what == "raises in reset":
            raise RuntimeError("no")

    def step(self, message):
        self.steps += 1
        act = getattr(self, f"_{self.what.replace(' ', '_')}", None)
        if act:
            return act(message)
        return [{"role": "user", "content": f"{self.what} {message['content']}"}], None, self.steps == 3

    def _raises(self, message):
        raise RuntimeError("no")

    def _hangs(self, message):
        time.sleep(1000)

    def _exits(self, message):
        os._exit(3)

    def _is_killed(self, message):
        os.kill(os.getpid(), 9)

    def _kills_its_parent(self, message):
        os.kill(os.getppid(), 9)
        time.sleep(1000)

    def _returns_nan(self, message):
        return [], float("nan"), True

    def _returns_none(self, message):
        return None

    def _returns_nothing(self, message):
        return [], None, False

    def _returns_an_image(self, message):
        return [{"role": "user", "content": [{"type": "image"}]}], None, False

    def _closes_its_files(self, message):
        os.closerange(3, 64)
        time.sleep(1000)

    def _says_much(self, message):
        return [{"role": "user", "content": "word " * 200_000}], None, False

    def _leaves_children(self, message):
        if not os.fork():
            time.sleep(1000)
        subprocess.Popen(SLEEP, start_new_session=True)
        state = Path(f"/proc/{helper.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return [], float(state != "Z"), True

    def _prints_much(self, message, write=lambda text: print(text, flush=True)):
        for _ in range(20):
            write("x" * (1 << 18))
        return [], 1.0, True

    def _writes_to_its_files(self, message):
        return self._prints_much(message, lambda text: [os.write(file, text.encode()) for file in (1, 2)])

    def _has_a_child_print(self, message):
        return self._prints_much(message, lambda text: subprocess.run(["head", "-c", f"{len(text)}", "/dev/zero"], check=True))

    def _sleeps(self, message):
        time.sleep(1.0)
        return [], 1.0, True

    def _says_what_it_sees(self, message):
        secrets = [os.environ.get(name) for name in ("MY_TOKEN", "RANK")]
        first_to_end = Path("/proc/self/oom_score_adj").read_text().strip()
        return [{"role": "user", "content": f"{secrets} {first_to_end}"}], None, False

    def _draws(self, message):
        DRAWN.append(1)
        return [{"role": "user", "content": f"{random.random()} {self.seed} {len(DRAWN)}"}], None, False
