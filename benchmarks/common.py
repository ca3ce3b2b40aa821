"""Shared by all benchmarks: spread, a description of the machine, result files, and a script run as its user would start it.

Nothing heavy is imported here: scoring processes and other environments read this file too.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))
from user_processes.server import python_path  # noqa: E402


def torchrun(script: str, ranks: int = 2) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]


MODES = {  # two cores each: one process of two threads, or two ranks of one
    "sync": ["train_sync.py"],
    "one step off": torchrun("train_one_step_off.py"),
    "async": torchrun("train_async.py"),
}


def of_fixed_length(command: list[str]) -> list[str]:
    """The command of a script, with responses that all have --max-response-length tokens."""
    return [*command[:-1], "benchmarks/fixed_length.py", command[-1]]


def threads_of(command: list[str]) -> int:
    """Threads that each process of a command of MODES is given."""
    return 1 if "torch.distributed.run" in command else 2


def synchronize() -> None:
    """Waits for what is queued on an accelerator, if there is one, so that it is measured."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# ----------------------------------------------------------------------------------------------- numbers and tables


def over(values: list[float], form: str = ".2f") -> str:
    """median (min - max)"""
    if len(values) == 1:
        return f"{values[0]:{form}}, one round"
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def ratios(values: list[float], base: list[float]) -> list[float]:
    """Round by round: what a slow minute does to both sides cancels out."""
    return [a / b for a, b in zip(values, base, strict=True)]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def setting(*packages: str, **more) -> dict:
    """The machine, its load now, the versions and the thread settings: what stands under a table."""
    from rl.ranks.host import cpu_name

    out = {"processor": cpu_name(), "cores": os.cpu_count(), "load average": round(os.getloadavg()[0], 2)}
    out |= {"python": platform.python_version()}
    out |= {package: importlib.metadata.version(package) for package in ("torch", *packages)}
    return out | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "default")} | more


def words(setting: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in setting.items())


def write(name: str, data, text: str, out: Path = RESULTS) -> None:
    """Prints the table and writes it as <out>/<name>.md, and the numbers as <out>/<name>.json."""
    print(text, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (out / f"{name}.md").write_text(text.rstrip() + "\n")


def logged(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl that is being written."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def by_seed(sides: Iterable[str], seeds: int, one_run: Callable[[str, int], Any]) -> dict[str, list]:
    """What one_run(side, seed) returns, of each side for seeds 0, 1, ...; the sides take turns."""
    runs = {side: [] for side in sides}
    for seed in range(seeds):
        for side, its in runs.items():
            its.append(one_run(side, seed))
            print(f"seed {seed}, {side}: {its[-1]}", flush=True)
    return runs


class Rounds:
    """Counts rounds until enough are done or the next would take longer than the minutes allowed, and reports progress."""

    def __init__(self, most: int, minutes: float):
        self.most, self.limit, self.started = most, 60 * minutes, time.perf_counter()

    def __iter__(self):
        for number in range(self.most):
            yield number
            spent = time.perf_counter() - self.started
            done = number + 1
            print(f"round {done} of {self.most}, {spent / 60:.1f} minutes", flush=True)
            if done < self.most and spent * (done + 1) / done > self.limit:
                print(f"no further round: it would end after the {self.limit / 60:.0f} minutes of --minutes", flush=True)
                return


# ------------------------------------------------------------------------------------------- one run, in processes


@dataclass
class Finished:
    seconds: float  # of the whole command
    peak_gb: float  # resident memory of all its processes together, sampled; what processes share counts once
    output: str
    started: float  # time.time() when it began
    first_line: float  # seconds until it had said something; that of the whole command if it never did
    validations: list[dict] = field(default_factory=list)  # of a training script, in order of step


def run(command: list[str], threads: int, timeout: float = 3600, **env: str) -> Finished:
    """Runs a command from the repository's root; raises with its last lines if it fails."""
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path(str(ROOT))}
    environment = os.environ | own | env
    started, clock, said = time.time(), time.perf_counter(), []
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    memory = PeakMemory(process.pid)
    listen = lambda: said.extend((time.perf_counter() - clock, line) for line in process.stdout)  # noqa: E731
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        code = process.wait(timeout)
    except BaseException:
        process.terminate()
        raise
    finally:
        memory.stop()
    seconds = time.perf_counter() - clock
    listener.join(10)  # a process that it has left behind may keep the pipe open
    output = "".join(line for _, line in said)
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with code {code}:\n{output[-3000:]}")
    return Finished(seconds, memory.peak_gb, output, started, said[0][0] if said else seconds)


def run_script(python: str, command: list[str], *flags: str, **env: str) -> tuple[Finished, list[dict]]:
    """Runs a script of MODES; returns also the rows of its metrics.jsonl."""
    from rl.record import validations

    with tempfile.TemporaryDirectory() as out:
        done = run([python, *command, "--output-dir", out, *flags], threads_of(command), **env)
        (directory,) = Path(out).iterdir()
        done.validations = validations.read(directory)
        return done, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def accuracies(validations: list[dict]) -> dict[int, float]:
    """The greedy validation accuracy, by the step whose weights were validated. validations: of rl/record/validations.py; the
    rows of metrics.jsonl have the newest one only where several arrived during a step."""
    from rl.record.validations import score

    return {row["step"]: value for row in validations if (value := score(row)) is not None}


def step_seconds(row: dict) -> float:
    """The seconds of a step, from its row in metrics.jsonl, without validation and checkpoints."""
    return row["timing_s/step"] - sum(row.get(name, 0.0) for name in ("timing_s/testing", "timing_s/save_checkpoint"))


class PeakMemory(threading.Thread):
    """Samples the memory of a process and all its descendants (Linux; elsewhere it stays 0).

    Counted is what each holds resident, a page that n processes share as an n-th of it in each (PSS): libraries are mapped by
    every rank and are in memory once. The kernel takes tens of milliseconds to tell that, so it is asked only where the plain
    sum, which is free, has grown.
    """

    EVERY = 0.25  # seconds
    GROWN = 1.01  # of the largest plain sum so far

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid, self.peak_gb, self._plain, self._done = pid, 0.0, 0.0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.wait(self.EVERY):
            members = tree(self.pid)
            if (plain := sum(members.values())) > self.GROWN * self._plain:
                self._plain, self.peak_gb = plain, max(self.peak_gb, sum(map(proportional_gb, members)))

    def stop(self) -> None:
        self._done.set()
        self.join()


def tree(pid: int) -> dict[int, float]:
    """The process and its descendants -> resident GB, shared pages in full."""
    parents, resident = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            resident[int(entry.name)] = int((entry / "statm").read_text().split()[1])
    members = {pid}
    while grown := {child for child, parent in parents.items() if parent in members} - members:
        members |= grown
    return {member: resident.get(member, 0) * os.sysconf("SC_PAGE_SIZE") / 1e9 for member in members}


def proportional_gb(pid: int) -> float:
    """Resident GB of a process, a page that n share counted as an n-th; 0 if it has just ended."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024 / 1e9
    return 0.0


# -------------------------------------------------------------------------------------------------- models and reward


def share_of_digits(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """A reward that differs from response to response, for models that never add right."""
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def fifty_milliseconds(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """A reward that takes its time, without a core's work."""
    time.sleep(0.05)
    return share_of_digits(data_source, solution_str, ground_truth)


def random_model(
    path: str, hidden: int, layers: int, vocabulary: int, tied: bool = False, kv_heads: int | None = None, fill: bool = False
) -> int:
    """Saves a random Qwen2 model whose end token (id 1) is one of `vocabulary` about equally likely ones, so that responses
    have geometric lengths of about that mean, and a tokenizer of one token a character. fill: names the rest of a larger
    vocabulary, which otherwise decodes to nothing. Returns its parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    from examples.demo.sums import CHARACTERS, CHAT_TEMPLATE, SPECIAL

    letters = [chr(c) for c in range(33, 127) if chr(c) not in CHARACTERS]
    characters = [*SPECIAL, *CHARACTERS, *letters][:vocabulary]
    characters += [f"<{number}>" for number in range(len(characters), vocabulary)] if fill else []
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=kv_heads or max(2, hidden // 64),
        intermediate_size=4 * hidden,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    names = dict(pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=None, bos_token=None)
    vocab = {character: i for i, character in enumerate(characters)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=SPECIAL[2:], **names)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())
