"""Work on the device over what rests in host memory, piece by piece: copies there and back go under the work.

While one piece is worked on, the next one comes and the one before goes, each on a queue of its own. Three pieces are on the
device at once, no more: the host waits until a piece has left before it has another one fetched. What has come is then used by
no queue any more when its memory is given back. On a CPU there are no queues, and a piece is taken after the other.
"""

from collections import deque
from collections.abc import Callable, Iterable

import torch

from rl.ranks.device import copy_streams


def overlapped(device: torch.device, pieces: Iterable, fetch: Callable, work: Callable, put: Callable) -> None:
    """put(piece, work(piece, fetch(piece))) for each piece. fetch and put only copy; work may use what was there before, and
    must not read what another piece's put writes. All of it is done on return."""
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
