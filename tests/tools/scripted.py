"""An engine without a model, and what is around one without processes, for tests and benchmarks of generators."""

from collections import Counter
from types import SimpleNamespace

from rl.generation.engine import Output, Request
from rl.rewards.score import Score


class ScriptedEngine:
    """The contract of rl/generation/engine.py with `script(request) -> (token_ids, log_probs)` in place of a model. Each step
    adds a token to every request, in order of arrival."""

    def __init__(self, script, eos_token_id: int):
        self.script, self.eos_token_id, self.version = script, eos_token_id, -1
        self._running: list[tuple[Request, list[int], list[float], list[int]]] = []

    def add(self, request: Request) -> None:
        token_ids, log_probs = self.script(request)
        limit = request.sampling.max_tokens
        versions = list(request.so_far.versions) if request.so_far else []
        self._running.append((request, token_ids[:limit], log_probs[:limit], versions))

    def step(self) -> list[Output]:
        for _, _, _, versions in self._running:
            versions.append(self.version)
        done = [r for r in self._running if len(r[3]) >= len(r[1])]
        self._running = [r for r in self._running if len(r[3]) < len(r[1])]
        reason = {True: "stop", False: "length"}
        return [Output(r.id, t, lp, v, reason[t[-1] == self.eos_token_id]) for r, t, lp, v in done]

    def unfinished(self) -> list[Output]:
        return [Output(r.id, t[: len(v)], lp[: len(v)], list(v), "unfinished") for r, t, lp, v in self._running]

    def tokens_of(self, ids) -> dict[object, list[int]]:
        return {r.id: t[: len(v)] for r, t, _, v in self._running if r.id in ids}

    def abort(self) -> None:
        self._running = []

    def update(self, weights, version: int, recompute_kv: bool = False) -> None:
        for _ in weights:
            pass
        self.version = version

    @property
    def num_unfinished(self) -> int:
        return len(self._running)


class ScriptedPool:
    """In place of rl/rewards/pool.py: a response that comes without a score is worth `worth`. texts: by ticket and number."""

    def __init__(self, worth: float = 1.0):
        self.worth, self.pending, self.texts, self.events = worth, [], {}, Counter()

    def submit(self, key, source, text, *_, **further) -> None:
        self.texts[key[0].number, key[1]] = text
        self.hand_back(key, Score(self.worth))

    def hand_back(self, key, score: Score) -> None:
        self.pending.append((key, score))

    def wait(self, _=0.0) -> list:
        done, self.pending = self.pending, []
        return done

    def close(self) -> None:
        pass


def scripted_job(prompt, **more) -> SimpleNamespace:
    """A job whose every ticket is this prompt. Text is the token ids."""
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    job = {
        "order": lambda ticket: (0, 0),
        "prompts": [prompt],
        "val_prompts": [prompt],
        "tokenizer": tokenizer,
        "total_steps": 9,
        "val_sets": None,
        "environments": None,
    }
    return SimpleNamespace(**job | more)


def engine_ranks(is_leader: bool = True, **more) -> SimpleNamespace:
    """The ranks of the job's only engine, by default one."""
    return SimpleNamespace(**{"is_leader": is_leader, "size": 1, "index": 0, "engines": 1, "agree": lambda said: said} | more)
