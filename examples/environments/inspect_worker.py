"""A worker of --serve-policy that plays samples of an Inspect task, to evaluate a checkpoint or to train on the score.

    python -m venv inspect && inspect/bin/pip install inspect-ai openai    # apart from the run's own packages
    for sample in $(seq 0 99); do echo "{\\"data_source\\": \\"my_task\\", \\"sample\\": $sample}"; done > samples.jsonl
    export SERVE_POLICY_KEY=$(openssl rand -hex 16)
    torchrun --standalone train_sync.py --model runs/my_run/step_000100 --val-only --serve-policy 8000 --env-timeout 300 \\
        --val-files samples.jsonl --max-prompt-length 1024 --max-response-length 2048 &
    inspect/bin/python examples/environments/inspect_worker.py http://127.0.0.1:8000 my_task.py@my_task

The column `sample` of a row is the number of its sample in the task's data set. The task's solver calls the policy, with its
tools and sandbox; the score is that of its first scorer, as a number. Inspect's logs are in logs/inspect. A worker plays one
sample at a time: start several. Left out: the task's
metrics over all samples, and its epochs: --val-n.
"""

import sys
import urllib.error
from contextlib import suppress
from pathlib import Path

from inspect_ai import eval as evaluate
from inspect_ai.model import get_model
from inspect_ai.scorer import value_to_float

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from worker import post, work

LOGS = "logs/inspect"


def play(url: str, episode: dict) -> None:
    """Play one sample."""
    number, key = episode["row"]["sample"], episode["api_key"]
    model = get_model("openai-api/run/policy", base_url=url, api_key=key, memoize=False)
    (log,) = evaluate(sys.argv[2], model=model, limit=(number, number + 1), log_dir=LOGS, display="none")
    failed = log.error or next((sample.error for sample in log.samples if sample.error), None)
    if failed:
        end = {"error": failed.message}
    else:
        scores = log.samples[0].scores
        end = {"reward": value_to_float()(next(iter(scores.values())).value)}
    with suppress(urllib.error.HTTPError):  # 401 or 410: the episode has ended, as after --env-timeout
        post(f"{url}/episodes/end", key, end)


if __name__ == "__main__":
    work(sys.argv[1], play)
