"""The responses that scoring processes (user_processes/scoring.py) work on, and those that wait for a grader that is out."""

import json
import os
from typing import Any

from rl.errors import UserError
from rl.rewards.args import CODE, RewardArgs
from rl.rewards.outages import LastScored, Outages
from rl.rewards.score import BUILT_IN, EVENTS, Score, as_score, grade
from user_processes.server import Server, as_json, without_job

MEMORY = 32 << 30  # bytes that a scoring process may allocate


class Scorers:
    """A process with --reward-workers scoring processes. All end with this object's `close`, or with the rank."""

    def __init__(self, args: RewardArgs):
        """Raise UserError if the user's functions cannot be imported, or called as a verifier."""
        self.args = args
        self.pending = 0  # responses whose score has not been returned
        self._count = 0  # responses given to the process so far
        self._keys: dict[int, Any] = {}  # number of a response in the process -> its key
        self._items: dict[Any, dict] = {}  # key of a response that has no final score, or LastScored -> its arguments
        self._name = args.own_reward or "scoring"
        self._outages = Outages(args.outage_timeout, args.own_reward or "the grader", self._send)
        settings = {"spec": args.reward if args.own_reward else "", "weights": args.reward_weights}
        settings["built_in"] = "rl.rewards.score:grade"
        settings |= {"timeout": args.reward_timeout, "memory": MEMORY, "workers": args.reward_workers}
        environment = without_job(os.environ)
        self._server = Server("user_processes.scoring", settings, environment, self._name, "the reward function")
        self.takes = self._server.ready["takes"]  # what the functions name of `prompt`, `step`, `split`

    def submit(self, key: Any, item: dict) -> None:
        """Queue a response. item: the function's arguments."""
        self._items[key] = item
        self._send(key)
        self.pending += 1

    def wait(self, timeout: float, tape: Any = None) -> list[tuple[Any, Score]]:
        """Return the responses scored since the last call, as (key, score); wait up to `timeout` seconds for one. tape: records
        the replies."""
        done: list[tuple[Any, Score]] = []
        waits = self.pending > (0 if self._outages.is_one else self._outages.waiting)
        for key, reply in self._replies(timeout if waits else 0.0):
            item = self._items[key]
            if tape and not isinstance(key, LastScored):
                tape.write_score(key, item, reply)
            score = score_of(reply, item, self.args)
            if not score.event:
                self._items[LastScored(item["data_source"])] = item
            done += self._outages.take(item["data_source"], key, score)
        done += self._outages.look(nothing_comes=timeout > 0 and len(done) + self._outages.waiting == self.pending)
        for key, _ in done:
            self._items.pop(key, None)
        self.pending -= len(done)
        return done

    def _replies(self, wait: float) -> list[tuple[Any, dict]]:
        """Return (key, reply) of the responses that were scored; wait up to `wait` seconds for one."""
        try:
            messages = self._server.receive(wait)
        except EOFError:
            messages = [{"failed": "the process that starts the scoring processes has ended"}]
        for message in messages:
            if "failed" in message:
                raise UserError(f"{self._name}: {message['failed']}")
        return [(self._keys.pop(message["number"]), json.loads(message["reply"])) for message in messages]

    def close(self) -> None:
        self._server.close()

    def _send(self, key: Any) -> None:
        self._count += 1
        self._keys[self._count] = key
        self._server.send(f"{self._count} {as_json(self._items[key])}")


def score_of(reply: dict, item: dict, args: RewardArgs) -> Score:
    """Return the score of a response. An answer that a built-in grader cannot finish grading gets the score of an empty one,
    its lowest. A program fails inside the sandbox, so an error of the grader itself is not the program's fault."""
    if "event" not in reply:
        return as_score(reply["value"])
    event = reply["event"] if reply["event"] in EVENTS else "error"
    if not args.own_reward and (event == "timeout" or (event == "error" and BUILT_IN[item["data_source"]] != CODE)):
        return as_score(grade(**item | {"solution_str": ""}))
    return Score(None, event=event, message=reply["message"] or f"no score after {args.reward_timeout:g} s (--reward-timeout)")
