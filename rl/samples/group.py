"""The record that generators send to learners: `Group`, one prompt with its n scored responses."""

import itertools
import json
import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

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
    rewards: list | None = None  # [token, reward] of each turn, which sum to the score; None: the last token gets the score
    histories: list[int] | None = None  # lengths: the first follows the group's prompt, the others attend only to themselves
    support: np.ndarray | None = None  # [n, K] int32, tokens that could be sampled in each place (rl/model/head/support.py)

    @property
    def sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self.token_ids) if self.mask is None else int(np.count_nonzero(self.mask))

    def reward(self, name: str) -> float | None:
        """Return the reward of that name, without the length penalty: "score", or a further number; None if it has none."""
        return self.extra.get(UNPENALISED, self.score) if name == "score" else self.extra.get(name)


@dataclass(frozen=True)
class Group:
    """A prompt with its responses. `ticket` is its place in the endless prompt order."""

    ticket: int
    prompt_ids: np.ndarray  # [p] int32
    data_source: str
    responses: list[Response]
    baseline: float = 0.0  # score of the greedy response (ReMax), if one was sampled
    images: str = ""  # digest of the prompt's images, which are not sent; empty without images
    prompt_routes: np.ndarray | None = None  # [p, L, K]; None if no response has routes

    @property
    def scored(self) -> list[Response]:
        """The responses except those that could not be scored."""
        return [r for r in self.responses if r.score is not None]

    @property
    def compared(self) -> list[Response]:
        """The scored responses that count in a baseline: all except those masked as a whole."""
        return [r for r in self.scored if r.mask is None or r.mask.any()]

    def differs(self, rewards: Sequence[str] = ()) -> bool:
        """Return whether the scores without the length penalty differ, or with names one of these rewards (--gdpo-reward-keys),
        which may differ even if their sums do not. With zero variance all group-wise advantages are 0, and a group of right
        responses would only teach their length (DAPO, arXiv 2503.14476, compares accuracy)."""
        names = [name for name in rewards if name != PENALTY] or ["score"]
        return any(len({r.reward(name) for r in self.compared}) > 1 for name in names)

    @property
    def is_flat(self) -> bool:
        """Whether several responses are compared and all have the same score, so that group-wise advantages are exactly 0."""
        return len(self.compared) > 1 and len({r.score for r in self.compared}) == 1

    @property
    def oldest(self) -> int:
        """The oldest version of the weights that sampled one of its tokens; without tokens, a version that is never too old."""
        return min((int(r.versions.min()) for r in self.responses if len(r.versions)), default=sys.maxsize)

    def to_bytes(self) -> bytes:
        """Return the group as bytes: a JSON header with the lengths, then the raw arrays. Nothing is pickled. Raise ValueError
        if the records of the sampling masks differ in width."""
        header = {
            "ticket": self.ticket,
            "data_source": self.data_source,
            "baseline": self.baseline,
            "prompt": len(self.prompt_ids),
            "responses": [
                [len(r.token_ids), r.finish_reason, r.score, r.extra, r.error, _runs(r.mask)] for r in self.responses
            ],
        } | ({"images": self.images} if self.images else {})
        if any(r.rewards for r in self.responses):
            header["rewards"] = [r.rewards for r in self.responses]
        if any(r.histories for r in self.responses):
            header["histories"] = [r.histories for r in self.responses]
        if self.prompt_routes is not None:
            has = [r.routes is not None for r in self.responses]
            header["routes"] = [str(self.prompt_routes.dtype), *self.prompt_routes.shape[1:], has]
        supports = [r.support for r in self.responses]
        widths = sorted({support.shape[1] for support in supports if support is not None})
        if len(widths) > 1:
            raise ValueError(f"ticket {self.ticket}: the sampling masks of its responses have records of {widths} columns")
        if widths:
            header["support"] = [*widths, [support is not None for support in supports]]
        head = json.dumps(header).encode()
        arrays = [self.prompt_ids.astype(np.int32)]
        for r in self.responses:
            arrays += [r.token_ids.astype(np.int32), r.log_probs.astype(np.float32), r.versions.astype(np.int32)]
        if self.prompt_routes is not None:
            arrays += [self.prompt_routes, *(r.routes for r in self.responses if r.routes is not None)]
        arrays += [support.astype(np.int32) for support in supports if support is not None]
        return b"".join([struct.pack("<I", len(head)), head, *(a.tobytes() for a in arrays)])

    @staticmethod
    def from_bytes(record: bytes | memoryview) -> "Group":
        """Return the group of a record. Its arrays are views of the record."""
        at = 4 + struct.unpack_from("<I", record)[0]
        header = json.loads(bytes(record[4:at]))

        def take(n: int, dtype) -> np.ndarray:
            nonlocal at
            array = np.frombuffer(record, dtype, n, at)
            at += array.nbytes
            return array

        prompt = take(header["prompt"], np.int32)
        arrays = [[take(n, dtype) for dtype in (np.int32, np.float32, np.int32)] for n, *_ in header["responses"]]
        masks = [_mask(runs) for *_, runs in header["responses"]]
        prompt_routes, routes = None, [None] * len(masks)
        if "routes" in header:
            dtype, *shape, has = header["routes"]
            rows = lambda n: take(n * math.prod(shape), dtype).reshape(n, *shape)  # noqa: E731
            prompt_routes = rows(len(prompt))
            routes = [
                rows(max(0, n - 1)) if is_there else None for (n, *_), is_there in zip(header["responses"], has, strict=True)
            ]
        rewards, histories = (header.get(name, [None] * len(masks)) for name in ("rewards", "histories"))
        width, has = header.get("support", [0, [False] * len(masks)])
        lengths = [n for n, *_ in header["responses"]]
        support = [
            take(n * width, np.int32).reshape(n, width) if there else None for n, there in zip(lengths, has, strict=True)
        ]
        parts = zip(arrays, header["responses"], masks, routes, rewards, histories, support, strict=True)
        responses = [Response(*of_one, *fields, *rest) for of_one, (_, *fields, _), *rest in parts]
        rest = (header["baseline"], header.get("images", ""), prompt_routes)
        return Group(header["ticket"], prompt, header["data_source"], responses, *rest)


def _runs(mask: np.ndarray | None) -> list[int] | Literal[False]:
    """Return a mask for a header: the lengths of its alternating runs of True (first, perhaps 0) and False. False stands for
    None."""
    if mask is None:
        return False
    ends = np.flatnonzero(np.diff(mask, prepend=True)).tolist()
    return [end - start for start, end in itertools.pairwise([0, *ends, len(mask)])]


def _mask(runs: list[int] | Literal[False]) -> np.ndarray | None:
    """Return the mask of `_runs`."""
    return None if runs is False else np.repeat(np.arange(len(runs)) % 2 == 0, runs)
