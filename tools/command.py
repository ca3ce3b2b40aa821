"""`flat-rl`, the command that `pip install .` brings: the programs of the repository by their names, in any directory.

flat-rl train_sync --model Qwen/Qwen2.5-0.5B-Instruct    as `python train_sync.py ...` in the repository
flat-rl report runs/a runs/b
flat-rl copy train_sync my_experiment.py                 a script of your own, to change
torchrun --nproc-per-node 2 -m train_sync                several ranks
"""

import importlib.util
import runpy
import sys
from pathlib import Path

PROGRAMS = {
    **{name: name for name in ("train_sync", "train_one_step_off", "train_async", "train_sft")},
    **{name: name for name in ("report", "view", "why", "replay", "rehearse", "plan", "doctor")},
    "from_verl": "tools.from_verl",
}


def main() -> None:
    match sys.argv[1:]:
        case ["copy", name, target] if name in PROGRAMS:
            copy(name, Path(target))
        case [name, *_] if name in PROGRAMS:
            del sys.argv[0]
            runpy.run_module(PROGRAMS[name], run_name="__main__", alter_sys=True)
        case _:
            print(f"{__doc__}\nPrograms: {', '.join(PROGRAMS)}. Each has --help.")
            sys.exit(sys.argv[1:] not in ([], ["--help"]))


def copy(name: str, target: Path) -> None:
    """Write the program's file to `target`, which must not be there."""
    source = Path(importlib.util.find_spec(PROGRAMS[name]).origin)
    try:
        with open(target, "x") as file:
            file.write(source.read_text())
    except OSError as error:
        sys.exit(f"error: {target} cannot be written ({error.strerror}). Choose another name.")
    print(f"{target}: a copy of {source}")
