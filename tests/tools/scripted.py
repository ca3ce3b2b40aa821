"""An engine without a model, for tests and benchmarks of what stands around an engine."""

from rl.generation.engine import Output, Request


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

    def abort(self) -> None:
        self._running = []

    def update(self, weights, version: int, recompute_kv: bool = False) -> None:
        for _ in weights:
            pass
        self.version = version

    @property
    def num_unfinished(self) -> int:
        return len(self._running)
