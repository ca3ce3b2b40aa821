"""Which folder of rl/ and tools/ may import which: each line of LAYERS imports only from the lines above it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

LAYERS = [
    ["errors", "printable", "masking", "background"],
    ["parts", "images"],
    ["user_processes"],
    ["ranges"],
    ["ranks"],
    ["transport"],
    ["split"],
    ["hub"],
    ["data", "rewards"],
    ["environments"],
    ["flags_help"],
    ["flags"],
    ["model"],
    ["record"],
    ["samples"],
    ["generation", "learning"],
    ["algorithm", "weights"],
    ["checkpoint"],
    ["setup"],
    ["training_run", "generator_loop"],
    ["split_run", "supervised"],
    ["recorded"],
    ["report", "view", "rehearse"],
    ["plan"],
    ["from_verl", "doctor", "command"],
]
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
HOUSES = ("rl", "tools")  # what a training process imports, and what a person runs around it; each folder is a room
USERS = "user_processes"  # the processes that run the user's code: one room
MOST_FILES = 16  # in a folder, __init__.py aside
TOOLS = {"plan"}  # not read for a run
BEFORE_VLLM = ROOT / "rl" / "generation" / "vllm"  # its sign sets what vLLM reads as it is imported, before any file imports it


def imported(file: Path) -> Iterator[str]:
    """Return the folders of HOUSES that the file imports, including imports within functions and for annotations."""
    for name in modules_imported(file):
        house, *rooms = name.split(".")
        if house == USERS:
            yield house
        elif house in HOUSES and rooms:
            yield rooms[0]


def files() -> Iterator[tuple[str, Path]]:
    """Return (room, file) for all of HOUSES and USERS."""
    yield from ((USERS, file) for file in sorted((ROOT / USERS).rglob("*.py")))
    for house in HOUSES:
        for file in sorted((ROOT / house).rglob("*.py")):
            room = file.relative_to(ROOT / house).with_suffix("").parts[0]
            if room != "__init__":
                yield room, file


def test_no_import_runs_upwards():
    upwards = [
        f"{file.relative_to(ROOT)} imports {other}"
        for room, file in files()
        for other in imported(file)
        if other not in ("__version__", room) and LEVELS[other] >= LEVELS[room]
    ]
    assert not upwards


def modules_imported(file: Path) -> Iterator[str]:
    """Return what the file imports, as rl.folder.file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_no_files_import_each_other_in_a_circle():
    """Files are removed as long as there is one that imports no other: what is left is a circle, and what leads to it."""
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for _, file in files() if file.name != "__init__.py"}
    left = {name: {*modules_imported(file)} & names.keys() - {name} for name, file in names.items()}
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left


def test_every_room_has_its_line():
    assert {room for room, _ in files()} == LEVELS.keys()


def test_tests_lie_in_the_folders_of_what_they_test():
    """In addition: of losses.py, of whole scripts as a user starts them, and of the project itself."""
    folders = {file.parent.name for file in (ROOT / "tests").rglob("test_*.py")}
    assert folders <= {*LEVELS, "losses", "scripts", "project"}


def test_losses_and_the_graders_import_nothing_of_ours():
    files = [ROOT / "losses.py", *(ROOT / "math_grader").glob("*.py"), *(ROOT / "program_grader").glob("*.py")]
    assert not [name for file in files for name in imported(file)]


@pytest.mark.parametrize("folder", sorted({file.parent for _, file in files()}), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_has_a_sign_and_few_files(folder):
    """The sign is a docstring without code, so a scoring process can import a folder without importing torch."""
    sign = folder / "__init__.py"
    if folder.parent != ROOT:
        tree = ast.parse(sign.read_text())
        assert ast.get_docstring(tree)
        assert len(tree.body) == 1 or (folder == BEFORE_VLLM and {*modules_imported(sign)} <= sys.stdlib_module_names)
    if folder.name not in TOOLS:
        assert len([*folder.glob("*.py")]) - 1 <= MOST_FILES


@pytest.mark.slow
def test_a_start_of_plain_training_imports_no_room_of_a_feature():
    """Imported where a flag or the model asks for it."""
    rooms = """algorithm.critic algorithm.staleness algorithm.teacher algorithm.words checkpoint.push checkpoint.resume
        data.demonstrations data.files data.image_prompts data.teacher_prompts environments.named environments.pool
        generation.episodes generation.vllm learning.adapters learning.batch_images learning.compact_adamw
        model.attention_kernels model.compiled model.expert_parallel model.hybrid model.liger model.router model.sampling_mask
        model.sequence_parallel model.vision_forward record.loggers rewards.outages rewards.scorers
        rewards.trl_functions samples.split_schedule split split_run supervised transport images"""
    names = [f"rl.{room}" for room in rooms.split()] + ["math_grader", "program_grader", "user_processes"]
    names += ["datasets", "liger_kernel", "mlflow", "openai", "peft", "vllm", "wandb"]
    code = f"import sys, train_sync; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
