"""Runs a script in a fork of a process that has its imports already (tests/tools/forks.py), with this process's environment,
pipes and signals, and ends with its exit code. Its processes bear $MARK as their name, a rank with its number behind.

    python -S tests/tools/forked.py plain 0 train_sync.py --lr 1e-5
    python -S tests/tools/forked.py plain 2 --max-restarts 3 train_async.py             # as torchrun --nproc-per-node 2
    python -S tests/tools/forked.py python -m torch.distributed.run --standalone --nproc-per-node 2 train_async.py    # the same
"""

import json
import os
import signal
import socket
import sys


def of_python(words: list[str]) -> list[str]:
    """Translate the arguments of Python (tests/tools/python): a script or a module, under torchrun or not."""
    ranks = "0"
    if words[:3] == ["-m", "torch.distributed.run", "--standalone"]:
        _, ranks, *words = words[3:]
    elif words[0] == "-m":
        words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
    return ["vllm" if "vllm" in words else "plain", ranks, *words]


imported, ranks, *arguments = of_python(sys.argv[2:]) if sys.argv[1] == "python" else sys.argv[1:]
connection = socket.socket(socket.AF_UNIX)
connection.connect(f"{os.environ['RL_TESTS']}/{imported}")
socket.send_fds(connection, [b" "], [0, 1, 2])
request = {"arguments": arguments, "environment": dict(os.environ), "ranks": int(ranks), "directory": os.getcwd()}
connection.sendall(json.dumps(request).encode() + b"\n")
answers = connection.makefile()
pid = int(answers.readline())
signal.signal(signal.SIGINT, lambda number, _: os.killpg(pid, number))  # as from a terminal
signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
code = answers.readline()
if not code:
    sys.exit("the process that forks runs has ended: what it said stands above")
sys.exit(int(code) if int(code) >= 0 else 128 - int(code))
