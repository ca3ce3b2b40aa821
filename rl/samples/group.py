"""The record that generators send to learners: `Group`, one prompt with its n scored responses."""

import json
import math
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rl.errors import UserError
from rl.ranks.dist import all_gather_bytes
from rl.rewards.score import OUT, event_of

# Names among a response's further numbers, if there is a length penalty
UNPENALISED = "unpenalised_score"
PENALTY = "overlong_penalty"


@dataclass(frozen=True)
class Response:
    """One sampled response of n tokens, the end-of-sequence token included."""

    token_ids: np.ndarray  # [n] int32
    log_probs: np.ndarray  # [n] float32, as recorded while sampling
    versions: np.ndarray  # [n] int32, of the weights that sampled each token
    finish_reason: str  # "stop" or "length"
    score: float | None = 0.0  # None if it could not be scored; then it is not trained
    extra: dict[str, float] = field(default_factory=dict)  # further numbers of the reward function
    error: str | None = None  # why it could not be scored
    mask: np.ndarray | None = None  # [n] bool, the tokens that the policy sampled; None: all of them. Others are not trained
    routes: np.ndarray | None = None  # [n - 1, L, K] uint8 or uint16, experts of all but the last token (rl/model/router.py)
    histories: list[int] | None = None  # lengths: the first follows the group's prompt, the others attend only to themselves
    support: np.ndarray | None = None  # [n, K] int32, tokens that could be sampled in each place (rl/model/sampling_mask.py)
    images: list[np.ndarray] | None = None  # files [bytes] uint8 of those among the tokens, which an environment has shown
    seconds: list[list[float]] | None = None  # of each turn of an episode: until it was sampled, until it was answered

    @property
    def sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self.token_ids) if self.mask is None else int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class Group:
    """A prompt with its responses. `ticket` is its place in the endless prompt order."""

    ticket: int
    prompt_ids: np.ndarray  # [p] int32
    data_source: str
    responses: list[Response]
    baseline: float = 0.0  # score of the greedy response (ReMax), if one was sampled
    images: str = ""  # digest of the prompt's images; those of the data are not sent; empty without images
    prompt_routes: np.ndarray | None = None  # [p, L, K]; None if no response has routes
    image_files: list[np.ndarray] | None = None  # as a response's, if an environment has shown those of the prompt
    _record: ClassVar[bytes | memoryview | None] = None  # what `from_bytes` has read: a record is not made twice

    @property
    def scored(self) -> list[Response]:
        """The responses except those that could not be scored."""
        return [r for r in self.responses if r.score is not None]

    @property
    def is_unscored(self) -> bool:
        """Whether no response could be scored."""
        return all(r.error is not None for r in self.responses)

    @property
    def lacks_scores(self) -> bool:
        """Whether an outage has left one of its responses without a score: its prompt has to come again."""
        return any(r.error is not None and event_of(r.error) == OUT for r in self.responses)

    @property
    def compared(self) -> list[Response]:
        """The scored responses that count in a baseline: all except those masked as a whole."""
        return [r for r in self.scored if r.mask is None or r.mask.any()]

    @property
    def differs(self) -> bool:
        """Whether the scores without the length penalty differ. Otherwise the group would at most teach the length of right
        responses (as in DAPO, arXiv 2503.14476)."""
        return len({r.extra.get(UNPENALISED, r.score) for r in self.compared}) > 1

    @property
    def is_flat(self) -> bool:
        """Whether several responses are compared and all have the same score, so that group-wise advantages are exactly 0."""
        return len(self.compared) > 1 and len({r.score for r in self.compared}) == 1

    @property
    def oldest(self) -> int:
        """The oldest version of the weights that sampled one of its tokens; without tokens, a version that is never too old."""
        return min((int(r.versions.min()) for r in self.responses if len(r.versions)), default=sys.maxsize)

    def to_bytes(self) -> bytes:
        """Return the group as bytes: a JSON header with the lengths, then the raw arrays in its order. Nothing is pickled."""
        if self._record is not None:
            return bytes(self._record)
        arrays = []

        def describe(array: np.ndarray) -> dict:
            arrays.append(array.tobytes())
            return {"array": [array.dtype.str, *array.shape]}

        fields = vars(self) | {"responses": [vars(response) for response in self.responses]}
        head = json.dumps(fields, default=describe).encode()
        return b"".join([struct.pack("<I", len(head)), head, *arrays])

    @staticmethod
    def from_bytes(record: bytes | memoryview) -> "Group":
        """Return the group of a record. Its arrays are views of it. Raise UserError for a record of earlier versions."""
        at = 4 + struct.unpack_from("<I", record)[0]

        def with_arrays(fields: dict) -> dict | np.ndarray:
            nonlocal at
            if not isinstance(fields.get("array"), list):
                return fields
            dtype, *shape = fields["array"]
            array = np.frombuffer(record, dtype, math.prod(shape), at).reshape(shape)
            at += array.nbytes
            return array

        fields = json.loads(bytes(record[4:at]), object_hook=with_arrays)
        if "prompt_ids" not in fields:
            raise UserError("These samples were recorded by an earlier version of the code. Read them with that version.")
        responses = [Response(**of_one) for of_one in fields["responses"]]
        group = Group(**fields | {"responses": responses})
        vars(group)["_record"] = record
        return group


def lack_scores(groups: Sequence[Group]) -> bool:
    """Return whether an outage has kept a step's groups from being scored: one of them lacks scores, or all have none."""
    return any(group.lacks_scores for group in groups) or (len(groups) > 0 and all(group.is_unscored for group in groups))


def all_gather_records(mine: Iterable[bytes]) -> list[memoryview]:
    """Return the records of all ranks of the default group, in rank order. Collective."""
    parts = all_gather_bytes(join_records(mine))
    return [record for part in parts for record in split_records(memoryview(part))]


def all_gather_groups(mine: list[Group]) -> list[Group]:
    """Return every rank's groups, in ticket order. Collective."""
    groups = [Group.from_bytes(record) for record in all_gather_records(group.to_bytes() for group in mine)]
    return sorted(groups, key=lambda group: group.ticket)


def join_records(records: Iterable[bytes]) -> bytes:
    """Return one record with all of them, each preceded by its length."""
    return b"".join(struct.pack("<Q", len(r)) + r for r in records)


def split_records(joined: bytes | memoryview) -> list[bytes | memoryview]:
    """Return the records that `join_records` has joined."""
    records = []
    at = 0
    while at < len(joined):
        (size,) = struct.unpack_from("<Q", joined, at)
        records.append(joined[at + 8 : at + 8 + size])
        at += 8 + size
    return records
