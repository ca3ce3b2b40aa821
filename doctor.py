"""Checks whether this project works on this machine: packages, driver, kernels, engines, publishes, and some steps of each
script.

    python doctor.py                                             # the demo's model, a few minutes
    python doctor.py --model Qwen/Qwen2.5-0.5B-Instruct --nproc 2

Prints one line a check: ok, slow (it works, and costs time), WRONG (and what to do), or skipped. doctor.json holds the numbers
behind the lines: attach it to an issue. Each check is a process of its own that ends with it. Exit code 1 if anything is WRONG.
"""

import argparse
import dataclasses
import importlib.util
import json
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path

from rl.masking import masked
from tools.doctor import packages, processes, scripts
from tools.doctor.processes import OK, SKIPPED, WRONG, Finding
from user_processes.child import adopt_orphans


class Doctor:
    """Prints findings as they arrive, and keeps them in a file that is complete at any moment."""

    def __init__(self, file: Path):
        self.file = file
        self.started = time.time()
        self.facts: dict = {"machine": platform.platform(), "host_python": sys.version.split()[0]}
        self.findings: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            print(finding, flush=True)
            self.findings.append(finding)
        self.write()

    def write(self) -> None:
        record = {
            "when": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
            "command": masked(sys.argv),
            "machine": self.facts,
            "checks": [dataclasses.asdict(finding) for finding in self.findings],
        }
        self.file.write_text(json.dumps(record, indent=2, default=str) + "\n")

    @property
    def wrong(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == WRONG]


def examine(args: argparse.Namespace, doctor: Doctor) -> None:
    """Run all checks, in an order in which each only relies on what earlier ones have found right."""
    found = processes.run([sys.executable, "-m", "tools.doctor.facts"], args.timeout)
    facts = json.loads(next(line for line in found.output.splitlines() if line.startswith("{"))) if found.code == 0 else {}
    kind = facts.get("kind", packages.kind_by_files())
    doctor.facts |= facts
    doctor.add(packages.check_packages(kind))
    if not facts:
        doctor.add(Finding("torch", WRONG, found.reason, f"install {packages.REQUIREMENTS[kind]} as its first lines say"))
        return
    doctor.add(*packages.check_driver(facts))

    engines = ["embedded"] + (["vllm"] if importlib.util.find_spec("vllm") else [])
    for engine in engines:
        doctor.add(*check_engine(engine, args))
    if len(engines) == 1:
        doctor.add(Finding("vllm", SKIPPED, "vLLM is not installed: only the embedded engine is checked"))

    dtype = "float32" if kind == "cpu" else "bfloat16"
    for script in scripts.SCRIPTS:
        ranks = args.nproc if script != "train_sync.py" or kind == "cpu" else max(1, min(args.nproc, facts["devices"]))
        doctor.add(*scripts.check_script(script, args.model, ranks, dtype, args.timeout))
    if kind == "cpu" and "vllm" in engines:  # where --engine auto takes the embedded engine
        doctor.add(*scripts.check_script("train_async.py", args.model, args.nproc, dtype, args.timeout, "vllm"))


def check_engine(engine: str, args: argparse.Namespace) -> list[Finding]:
    """What tools/doctor/measure.py finds out about the engine."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as directory:
        file = Path(directory) / "findings"
        file.touch()
        command = [sys.executable, "-m", "tools.doctor.measure", engine, args.model, str(file)]
        done = processes.run(command, args.timeout)
        found = [Finding(**json.loads(line)) for line in file.read_text().splitlines()]
    found = [dataclasses.replace(finding, check=f"{engine}, {finding.check}") for finding in found]
    if done.code != 0:
        after = f" after {found[-1].check}" if found else ""
        found.append(Finding(f"{engine}{after}", WRONG, done.reason, "docs/engines.md says what helps", done.facts))
    return found


def main() -> int:
    # Not tyro: this has to start where no package is installed yet.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory or hub name; by default the demo's, made on first use")
    parser.add_argument("--nproc", type=int, default=2, help="ranks of the jobs that are tried, 2 or more (2)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one check may take (600)")
    parser.add_argument("--out", type=Path, default=Path("doctor.json"), help="file for the numbers (doctor.json)")
    args = parser.parse_args()
    if args.nproc < 2:
        parser.error("--nproc: two of the scripts need a generator and a learner, so at least 2")
    if sys.version_info < (3, 11):  # noqa: UP036
        print("error: Python 3.11 or newer is needed", file=sys.stderr)
        return 1
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    doctor = Doctor(args.out)
    try:
        doctor.write()
    except OSError as error:
        print(f"error: --out {args.out}: {error.strerror}. Give a file that can be written.", file=sys.stderr)
        return 1
    try:
        examine(args, doctor)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    counts = {status: sum(f.status == status for f in doctor.findings) for status in (OK, "slow", WRONG, SKIPPED)}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    print(f"{summary} in {time.time() - doctor.started:.0f} s; {args.out} has the numbers: attach it to an issue")
    return int(bool(doctor.wrong))


if __name__ == "__main__":
    sys.exit(main())
