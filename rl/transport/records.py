"""Several records joined into one."""

import struct
from collections.abc import Iterable


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
