"""The environments of an engine that several ranks share (--rollout-tp): the first rank has the processes, all hear the same.

Its ranks must add the same requests to the engine, in the same order. They ask the same, so one message a poll suffices: what
was answered at the first rank.
"""

from collections.abc import Hashable, Iterator

from rl.environments.pool import Environments
from rl.generation.engine_ranks import EngineRanks


class SharedEnvironments:
    """Has the methods of Environments that episodes use. Every rank of the engine must call them alike."""

    def __init__(self, environments: Environments, engine_ranks: EngineRanks):
        self.ready, self._agree = environments.ready, engine_ranks.agree
        self._pool = environments if engine_ranks.is_leader else None
        self._asked: dict[Hashable, bool] = {}  # key -> whether it has something to answer

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._asked)

    @property
    def waiting(self) -> int:
        """Environments that have not answered."""
        return sum(self._asked.values())

    def begin(self, key: Hashable, **item) -> None:
        """Forks an episode's process at the first rank, and has it reset."""
        self._asked[key] = True
        if self._pool:
            self._pool.begin(key, **item)

    def ask(self, key: Hashable, what: str, **item) -> None:
        """Asks an episode's process, unless it has failed."""
        if key in self._asked:
            self._asked[key] = True
        if self._pool:
            self._pool.ask(key, what, **item)

    def end(self, key: Hashable) -> None:
        """Ends an episode's process."""
        self._asked.pop(key, None)
        if self._pool:
            self._pool.end(key)

    def close(self) -> None:
        """Ends all processes."""
        if self._pool:
            self._pool.close()

    def poll(self, wait: float = 0.0) -> list[tuple[Hashable, dict]]:
        """What the first rank's environments have answered. A collective of the engine's ranks where any are under way."""
        if not self._asked:
            return []
        answers = [(tuple(key), answer) for key, answer in self._agree(self._pool.poll(wait) if self._pool else [])]
        for key, answer in answers:
            if "event" in answer:
                self._asked.pop(key, None)
            elif key in self._asked:
                self._asked[key] = False
        return answers
