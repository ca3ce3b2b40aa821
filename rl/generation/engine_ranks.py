"""The ranks that share one tensor parallel engine (--rollout-tp) stay in step.

vLLM's ranks communicate in every layer, so all must add the same requests and step equally often. In a whole batch every rank
knows all tickets in advance. In a stream the engine's first rank decides on the next action, and sends it to the others.
"""

import json

import torch
import torch.distributed

from rl.errors import UserError
from rl.ranks.device import HOST_BACKEND
from rl.ranks.dist import Ranks
from rl.ranks.launch import nodes


class EngineRanks:
    """The ranks of the default process group that share this rank's engine: `size` consecutive ranks."""

    def __init__(self, ranks: Ranks, size: int):
        """Raise UserError if a node's generators cannot be divided into engines."""
        if torn := [node for node in nodes() if node.generators % size]:
            raise UserError(f"--rollout-tp {size}: an engine's ranks share a node, but {torn[0]}. Change --generators there.")
        self.size = size
        self.is_leader = ranks.rank % size == 0  # the engine's first rank decides, scores and hands over
        self.index, self.engines = ranks.rank // size, ranks.world_size // size  # this engine's number; the number of engines
        self._first = self.index * size
        self._group = None
        for first in range(0, ranks.world_size, size) if size > 1 else ():
            group = torch.distributed.new_group(range(first, first + size), backend=HOST_BACKEND)  # a collective of all engines
            self._group = group if first == self._first else self._group

    def agree(self, decision: list) -> list:
        """Return the first rank's decision, any JSON value, on all ranks."""
        if self._group is None:
            return decision
        text = json.dumps(decision).encode()
        size = torch.tensor([len(text)])
        torch.distributed.broadcast(size, self._first, self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if self.is_leader:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        torch.distributed.broadcast(data, self._first, self._group)
        return json.loads(data.numpy().tobytes())
