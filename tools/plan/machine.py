"""The ranks of a planned job."""

from dataclasses import dataclass

from rl.errors import UserError


@dataclass(frozen=True)
class Roles:
    """Ranks of the whole job, by role."""

    engines: int
    learners: int
    per_engine: int = 1  # ranks that share an engine (--rollout-tp)
    colocated: bool = False  # the same ranks generate and learn, in turn (train_sync.py)


@dataclass(frozen=True)
class Machine:
    """The nodes of a job, all alike."""

    nodes: int
    per_node: int  # ranks

    def split(self, generators: int, per_engine: int) -> Roles:
        """generators: of each node. Raise UserError if a role gets no rank, or an engine fewer than it needs."""
        if not 0 < generators < self.per_node or generators % per_engine:
            raise UserError(
                f"--generators {generators} of {self.per_node} ranks a node: both roles need a rank, and --rollout-tp "
                f"{per_engine} must divide the generators."
            )
        return Roles(self.nodes * generators // per_engine, self.nodes * (self.per_node - generators), per_engine)
