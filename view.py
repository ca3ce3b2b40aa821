"""Shows what a run wrote: its responses, token by token, with scores and curves.

    python view.py runs/demo                              # a page in the browser; from afar: ssh -L 7799:localhost:7799
    python view.py runs/a runs/b                          # two runs next to each other
    python view.py runs/demo --html page.html --steps 100-120    # the page as one file, for a colleague or an issue
    python view.py runs/demo --exact 12                   # also what the learner computed in step 12, by a replay
    python view.py runs/demo --jsonl rows.jsonl           # a line a response (tools/view/rows.py says what is in it)

In a notebook: `from view import read`. A run records its newest 20 steps and every tenth, and the prompts and scores of all
(--record-samples, docs/view.md).
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from rl.errors import UserError
from rl.ranks import process
from tools.recorded import Record
from tools.view import exports
from tools.view.rows import read

__all__ = ["read"]


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs."""
    port: int = 7799
    """Port of the page, on 127.0.0.1."""
    steps: str | None = None
    """First and last step, such as 100-120, of a file; by default all."""
    exact: int | None = None
    """A recorded step to replay: its tokens get columns of the learner (log-prob, ratio, advantage, clipping, entropy)."""
    html: Path | None = None
    """File to write the page to."""
    jsonl: Path | None = None
    """File to write the responses to."""
    atif: Path | None = None
    """File to write trajectories to, one a line, in the Agent Trajectory Interchange Format."""
    inspect: Path | None = None
    """File (.json) to write a log to that Inspect's viewer reads: inspect view --log-dir FOLDER."""


def main(args: Args) -> None:
    if not args.runs:
        raise UserError("give the directory of a run: python view.py runs/demo")
    steps = range_of(args.steps)
    for run in args.runs if args.exact is not None else ():
        replay(run, args.exact)
    for kind in exports.FORMATS:
        if file := getattr(args, kind):
            print(f"{file}: {exports.write(file, kind, args.runs, steps):,} responses")
            return
    from tools.view import server  # late: an export needs no server

    answers = server.Answers(args.runs)
    if args.html:
        server.as_file(answers, steps, args.html)
        print(f"{args.html}: {args.html.stat().st_size / 2**20:.1f} MB")
    else:
        server.serve(answers, args.port)


def replay(run: Path, step: int) -> None:
    """Let replay.py write what the learners compute of the step's tokens. This process ends if it fails."""
    record = Record(run)
    if step not in record.steps:
        raise UserError(f"--exact {step}: the steps that {run} has recorded are {', '.join(map(str, record.steps))}.")
    learners = record.start_of(step)["hardware"]["world_size"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={learners}"] if learners > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--from-step {step} --to-step {step} --tokens --output-dir".split()
        script = Path(__file__).with_name("replay.py")
        done = subprocess.run([sys.executable, *launcher, script, run, *flags, folder])
    if done.returncode:
        sys.exit(done.returncode)


def range_of(words: str | None) -> range:
    """Return the steps that --steps names."""
    if words is None:
        return range(sys.maxsize)
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", words)
    if not found:
        raise UserError(f"--steps {words}: give a step, or the first and the last with a hyphen: 100-120.")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except UserError as error:
        process.fail(error)
    except BrokenPipeError:
        sys.exit(1)
