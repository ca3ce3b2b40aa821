"""What a step of a script runs, and what a run loads: files of this project and their lines.

    python tests/tools/walk.py            # train_sync.py with the demo, two minutes on a busy machine

The lines of a step are those of the functions that it calls, in any thread; of what is loaded, those of whole files.
"""

import ast
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP = 3  # the one that is walked: the first steps use some things for the first time


def called_and_loaded(script: str, words: list[str], out: Path) -> None:
    """Run the script in this process, which ends with it, and write what it called and loaded to `out` as JSON."""
    from rl.training_run import TrainingRun

    called = set()
    steps = 0

    def note(frame, event, _):
        if event == "call" and steps == STEP - 1:
            called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    def end_of_step(self, *args):
        nonlocal steps
        steps += 1
        return save_if_due(self, *args)

    def end(code: int) -> None:
        files = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
        loaded = {str(Path(file).resolve()) for file in files if os.path.isabs(file)}
        out.write_text(json.dumps({"called": sorted(called), "loaded": sorted(loaded)}))
        leave(code)

    save_if_due, leave = TrainingRun.save_if_due, os._exit
    TrainingRun.save_if_due, os._exit = end_of_step, end
    threading.setprofile(note)
    sys.setprofile(note)
    sys.argv = [script, *words]
    runpy.run_path(str(ROOT / script), run_name="__main__")
    end(0)


def lines_of(file: Path, first: set[int]) -> int:
    """Return how many lines the functions have that begin at the lines `first`."""
    lines = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if begin in first:
                lines |= {*range(begin, node.end_lineno + 1)}
    return len(lines)


def walk(*words: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Return (lines called in a step by file, lines loaded by file, functions called) of a run of train_sync.py."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "walk.json"
        words = (*words, "--total-training-steps", str(STEP + 1), "--test-freq", "0", "--output-dir", directory)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RL_DEVICE": "cpu"}
        command = [sys.executable, __file__, str(out), "train_sync.py", *words]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=240)
        found = json.loads(out.read_text())

    def is_ours(file: str) -> bool:
        return Path(file).is_relative_to(ROOT) and file != __file__

    ours = [(Path(file), line) for file, line in found["called"] if is_ours(file)]
    called = {file: lines_of(file, {line for other, line in ours if other == file}) for file, _ in ours}
    loaded = [Path(file) for file in found["loaded"] if is_ours(file)]
    return (
        {str(file.relative_to(ROOT)): lines for file, lines in called.items() if lines},
        {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in loaded},
        len(ours),
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        out, script, *words = sys.argv[1:]
        called_and_loaded(script, words, Path(out))
    else:
        called, loaded, functions = walk()
        for file, lines in sorted(called.items(), key=lambda row: -row[1]):
            print(f"{lines:6} {file}")
        print(f"a step: {functions} functions in {len(called)} files, {sum(called.values()):,} lines")
        print(f"loaded: {len(loaded)} files, {sum(loaded.values()):,} lines")
