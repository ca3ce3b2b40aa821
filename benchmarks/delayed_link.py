"""A link with a delay, for kernels without tc's netem: two TAP devices, and this process between them.

    python benchmarks/delayed_link.py PID NAME PID NAME SECONDS         a process of each end's namespace; one way

Ends when its stdin is closed.
"""

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

from nodes import enter

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 2, 0x1000
QUEUE = 4096  # frames under way, each way; more are lost


def open_tap(pid: str, name: str) -> int:
    enter(int(pid), ["user", "net"])
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def main(first: str, its_name: str, second: str, its: str, seconds: str) -> None:
    a, b = open_tap(first, its_name), open_tap(second, its)
    print("ready", flush=True)
    other, delay = {a: b, b: a}, float(seconds)
    under_way: deque[tuple[float, int, bytes]] = deque()  # (when it is due, where, frame), in order
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([a, b, 0], [], [], wait)
        if 0 in ready and not os.read(0, 1):
            return
        for tap in {a, b}.intersection(ready):
            frame = os.read(tap, 1 << 16)
            if len(under_way) < QUEUE:
                under_way.append((time.monotonic() + delay, other[tap], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, tap, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # the end is down, or full
                os.write(tap, frame)


main(*sys.argv[1:])
