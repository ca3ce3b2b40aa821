"""A worker of --serve-policy that plays tasks of verifiers: its tasksets, or what `load_environment` loads in older versions.

    python -m venv tasks && tasks/bin/pip install verifiers uv    # or verifiers==0.1.14; apart from the run's own packages
    for task in $(seq 0 99); do echo "{\\"data_source\\": \\"my_tasks\\", \\"task\\": $task}"; done > tasks.jsonl
    export SERVE_POLICY_KEY=$(openssl rand -hex 16)
    torchrun --standalone --nproc-per-node 2 train_async.py --model Qwen/Qwen3-0.6B --serve-policy 8000 --env-timeout 300 \\
        --train-files tasks.jsonl --val-files tasks.jsonl --max-prompt-length 1024 --max-response-length 2048 &
    tasks/bin/python examples/environments/verifiers_worker.py http://127.0.0.1:8000 my_tasks --at-once 8 \\
        --given '{"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}'

`my_tasks` is an installed taskset or environment. The harness `null` only gives the model the task's tools, and `subprocess`
plays on this machine; --given is {} for older versions. The column `task` of a row is the number of its task, which gives the
prompt. The score is the package's, also if the budget of tokens is used up; an episode with another error is not scored.
Left out: several agents in an episode, and rewards that compare the responses of a group.
"""

import argparse
import asyncio
import json
import os
import sys
import urllib.error
from contextlib import nullcontext, suppress
from pathlib import Path

import verifiers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from worker import post, work

NO_ROOM = "budget of tokens or turns is used up"  # what the run says when it refuses the call


class Tasks:
    """A taskset of verifiers.v1."""

    def __init__(self, name: str, given: dict):
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self._vf = vf
        self._env = load_environment(resolve_env_config({"taskset": {"id": name}} | given))
        self.serving = self._env.serving
        self._left, self._tasks = iter(self._env.taskset), []

    async def play(self, number: int, model: str, **client) -> tuple[float, str]:
        """Return the reward, and the errors."""
        while len(self._tasks) <= number:
            self._tasks.append(next(self._left))
        context = self._vf.ModelContext(model=model, client=self._vf.EvalClientConfig(**client))
        episode = await self._env.run_episode(self._tasks[number], context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return sum(trace.reward for trace in episode.traces), "; ".join(error.message for error in errors)


class Rows:
    """An environment of older versions."""

    serving = nullcontext

    def __init__(self, name: str, given: dict):
        from verifiers.types import ClientConfig

        self._client, self._env = ClientConfig, verifiers.load_environment(name, **given)
        self._rows = self._env.get_dataset()

    async def play(self, number: int, model: str, base_url: str, api_key_var: str) -> tuple[float, str]:
        """Return the reward, and the errors."""
        client = self._client(api_base_url=base_url, api_key_var=api_key_var, max_retries=0)
        output = await self._env.run_rollout(self._rows[number], client, model, {})
        return output["reward"], json.dumps(output.get("error")) if output.get("error") else ""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the run's engine, such as http://127.0.0.1:8000")
    parser.add_argument("name", help="of the taskset or environment, as `verifiers` takes it")
    parser.add_argument("--at-once", type=int, default=4, help="episodes that are played at the same time")
    parser.add_argument(
        "--given", type=json.loads, default={}, help="JSON: fields of EnvConfig, or arguments of load_environment"
    )
    args = parser.parse_args()
    tasks = (Rows if hasattr(verifiers, "load_environment") else Tasks)(args.name, args.given)
    loop = asyncio.get_running_loop()

    def play(url: str, episode: dict) -> None:
        key = episode["api_key"]
        client = {"base_url": url, "api_key_var": f"KEY_{key}"}  # both versions read the key from a variable
        os.environ[client["api_key_var"]] = key
        played = tasks.play(episode["row"]["task"], episode["model"], **client)
        reward, errors = asyncio.run_coroutine_threadsafe(played, loop).result()
        del os.environ[client["api_key_var"]]
        end = {"error": errors} if errors and NO_ROOM not in errors else {"reward": reward}
        with suppress(urllib.error.HTTPError):  # 401 or 410: the episode has ended, as after --env-timeout
            post(f"{url}/episodes/end", key, end)

    async with tasks.serving():
        await asyncio.gather(*(asyncio.to_thread(work, args.url, play) for _ in range(args.at_once)))


if __name__ == "__main__":
    asyncio.run(main())
