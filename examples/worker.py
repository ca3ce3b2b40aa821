"""A worker that takes episodes from a run on any machine, plays each, and ends it with a reward, until the run has ended.

    export SERVE_POLICY_KEY=$(openssl rand -hex 16)
    torchrun --standalone --nproc-per-node 2 train_async.py --model demo-calculator --serve-policy 8000 \
        --max-response-length 24 --train-batch-size 16 --total-training-steps 40 &
    for i in 1 2 3 4; do python examples/worker.py http://127.0.0.1:8000 & done; wait

It plays like examples/agent.py. A worker may start before the run, and continues if the run is resumed. See docs/agents.md.
"""

import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from agent import answer

PATIENCE = 600  # seconds without an answer from the run after which the worker exits


def post(url: str, key: str, body: dict) -> dict:
    """Return the answer; an empty one if there is no episode yet."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.loads(reply.read() or "{}")


def play(url: str, episode: dict) -> None:
    """Play one episode. If it ends without a reward, as when its budget is used up, the run's grader scores it."""
    key = episode["api_key"]
    os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": episode["model"]}
    end = {}
    with contextlib.suppress(urllib.error.HTTPError):  # 400: the budget is used up
        end["reward"] = float(answer(episode["row"]["prompt"]) == episode["row"]["ground_truth"])
    with contextlib.suppress(urllib.error.HTTPError):  # 401 or 410: the episode has ended, as after --env-timeout
        post(f"{url}/episodes/end", key, end)


def work(url: str, play: Callable[[str, dict], None] = play) -> None:
    """Play one episode after another until the run has ended. play: plays the episode, given the URL of the model."""
    heard = time.monotonic()
    while time.monotonic() < heard + PATIENCE:
        try:
            if episode := post(f"{url}/v1/episodes/next", os.environ["SERVE_POLICY_KEY"], {}):
                play(f"{url}/v1", episode)
            else:
                time.sleep(1)
            heard = time.monotonic()
        except urllib.error.HTTPError as error:
            if error.code != 410:  # the run has ended
                raise
            return
        except OSError:  # the run has not started, or is restarting
            time.sleep(1)


if __name__ == "__main__":
    work(sys.argv[1])
