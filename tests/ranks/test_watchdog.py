"""Jobs that hang on purpose: the message names a rank, the ranks print their stacks, and no process is left."""

import re
import signal
import subprocess
from types import SimpleNamespace

import pytest
from helpers import eventually, left_over, start

from rl.ranks import stops


def end(process: subprocess.Popen, mark: str) -> tuple[int, str]:
    """Wait for the end of a job. Return exit code and console. It must leave no process."""
    try:
        text, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    assert eventually(lambda: not left_over(mark), 20)
    return process.returncode, text


@pytest.mark.runs
@pytest.mark.timeout(240)
def test_a_rank_that_does_not_come_to_a_collective(tmp_path):
    """The one that waits for it names itself; the stack of the other one shows where that is."""
    code, text = end(*start("tests/programs/hung_ranks.py", tmp_path / "pid", ranks=2))
    assert code == 1 and text.count("has made no progress for 3 s (--hang-timeout). Its threads:\n") == 1, text
    waits, hangs = text.split("rank 1 was waiting, or has kept others waiting. Its threads:\n")
    assert "error: rank 0 has made no progress" in waits and re.search(r'dist.py", line \d+ in all_reduce_sum', waits)
    assert re.search(r'hung_ranks.py", line \d+ in main', hangs)
    assert "traceback : rank 0 has made no progress for 3 s (--hang-timeout)" in text, "torchrun's summary"


@pytest.mark.runs
@pytest.mark.timeout(240)
def test_slow_is_not_hung():
    code, text = end(*start("tests/programs/hung_ranks.py"))
    assert code == 1 and "got on 4 times" in text[: text.index("rank 0 has made no progress for 2 s")]
    assert re.search(r'hung_ranks.py", line \d+ in main', text)


def test_a_cause_is_a_hang_or_not(monkeypatch, capfd):
    """Only after a hang a rank that torchrun ends prints its stacks."""
    for cause, printed in (("rank 1 failed", False), (f"rank 1 has made no progress for 9 s {stops.HANGS}", True)):
        store = SimpleNamespace(check=lambda keys: keys == [stops.FAILED], get=lambda key, cause=cause: cause.encode())
        monkeypatch.setattr(stops.launch, "open_store", lambda store=store: store)
        assert stops._ask() == "" and ("Its threads:" in capfd.readouterr().err) == printed
