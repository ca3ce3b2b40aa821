"""Processes data in host memory on the device, piece by piece: the copies there and back overlap with the work.

While one piece is processed, the next one arrives and the previous one leaves, each on a separate stream. At most three pieces
are on the device: the host waits until a piece has left before it fetches another one, so that no stream uses a piece whose
memory is freed. A CPU has no streams and processes one piece after the other.
"""

from collections import deque
from collections.abc import Callable, Iterable

import torch

from rl.ranks.device import copy_streams


def overlapped(device: torch.device, pieces: Iterable, fetch: Callable, work: Callable, put: Callable) -> None:
    """Run put(piece, work(piece, fetch(piece))) for each piece. fetch and put only copy; work must not read what another
    piece's put writes. Everything is done on return."""
    if (streams := copy_streams(device)) is None:
        for piece in pieces:
            put(piece, work(piece, fetch(piece)))
        return
    here, (inward, outward) = torch.accelerator.current_stream(device), streams
    fetched, leaving = deque(), deque()

    def work_on_first() -> None:
        piece, came, has_come = fetched.popleft()
        here.wait_event(has_come)
        made = work(piece, came)
        is_made = here.record_event()
        with outward:
            outward.wait_event(is_made)
            put(piece, made)
            leaving.append((came, made, outward.record_event()))
        if len(leaving) == 2:
            leaving.popleft()[-1].synchronize()

    for piece in pieces:
        with inward:
            came = fetch(piece)
            fetched.append((piece, came, inward.record_event()))
        if len(fetched) == 2:
            work_on_first()
    while fetched:
        work_on_first()
    while leaving:
        leaving.popleft()[-1].synchronize()
