"""tools.from_verl translates the first set of verl commands (fixtures/verl/first): their scripts, devices and variables."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT

from tools.from_verl import translate
from tools.from_verl.__main__ import read, report
from tools.from_verl.command import read_script, read_words

FIRST = ROOT / "tests" / "fixtures" / "verl" / "first"
ONE_STEP_OFF = (FIRST / "001_one_step_off.sh").read_text()
SYNC, ONE, ASYNC = "train_sync.py", "train_one_step_off.py", "train_async.py"
# fmt: off
COMMANDS = {  # script, nodes, ranks of a node, generators of a node, words of a note
    "000_async": (ASYNC, 1, 2, 1, None),
    "000_sync": (SYNC, 1, 2, None, None),
    "001_one_step_off": (ONE, 1, 8, 4, "4 of the 8 devices"),
    "002_vlm": (ASYNC, 2, 16, 8, "2 nodes of 8 generators and 8 learners each"),
    "003_dapo": (ASYNC, 4, 16, 8, "4 nodes of 8 generators and 8 learners each"),
    "004_async_vllm": (SYNC, 1, 8, None, "total_training_steps 500 decides"),
    "004_engineworker": (SYNC, 1, 8, None, "total_training_steps 500 decides"),
    "004_qwen25_3b": (SYNC, 1, 16, None, "total_training_steps 500 decides"),
    "004_qwen3_30b": (SYNC, 2, 8, None, "verl's gspo aggregates as seq-mean-token-mean whatever"),
}
# fmt: on


def layout(found) -> tuple:
    """(script, nodes, ranks of a node, generators of a node)."""
    launch = dict(zip(found.launcher, found.launcher[1:], strict=False))
    return found.script, int(launch.get("--nnodes", 1)), int(launch["--nproc-per-node"]), found.flags.get("--generators")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_becomes_the_right_script_on_the_right_devices(name):
    assert {path.stem for path in FIRST.glob("*.sh")} == {*COMMANDS}, "every command is tested"
    *expected, note = COMMANDS[name]
    found = translate.translate(read_script((FIRST / f"{name}.sh").read_text()))
    assert layout(found) == tuple(expected) and not found.refusal
    assert note is None or any(note in line for line in found.notes), found.notes
    assert not [key for key, (verdict, _) in found.verdicts.items() if verdict == "unknown"]


@pytest.mark.parametrize("row", (FIRST.parent / "variations.jsonl").read_text().splitlines())
def test_variations_of_the_one_step_off_command(row):
    """A pool of its own leaves the trainer what is left; without nodes a key of main_ppo's configuration means nothing."""
    text, row = ONE_STEP_OFF, json.loads(row)
    for old, new in row["changed"].items():
        assert old in text
        text = text.replace(old, new)
    found = translate.translate(read_script(text))
    assert layout(found) == tuple(row["expected"])
    assert any(row["note"] in line for line in found.notes) or not row["note"], found.notes


def test_its_keys_alone_are_enough():
    given = [f"{key}={value}" for key, value in read_script(ONE_STEP_OFF).values.items()]
    found = translate.translate(read_words(given))
    assert layout(found) == (ONE, 1, 8, 4) and any("The command counts as verl's one_step_off_policy" in n for n in found.notes)


@pytest.mark.parametrize("before", [[], ["bash"]])
def test_a_path_is_read_as_a_file_and_takes_the_scripts_own_words(before, tmp_path):
    path = FIRST / "001_one_step_off.sh"
    command = read([*before, str(path), "data.seed=5", "trainer.total_epochs=2"])
    assert command.values["data.seed"] == 5 and command.values["trainer.total_epochs"] == 2
    assert len(command.values) == len(read([str(path)]).values) + 1


def test_without_torch_it_ends_in_one_line(tmp_path):
    """Modules that cannot be found hide torch and transformers."""
    hide = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers']))\n"
    run = f"{hide}sys.argv = ['x', 'data.seed=1']; from tools.from_verl.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "torch" in done.stderr and "pip install" in done.stderr


# ------------------------------------------------------------------------------------------------ the environment


def section(text: str) -> dict[str, str]:
    """Return name -> line of the section on the environment."""
    printed = report(read_script(text)).splitlines()
    start = next(i for i, line in enumerate(printed) if line.startswith("# the environment"))
    lines = []
    for line in printed[start + 1 :]:
        if not line.startswith("#   "):
            break
        lines.append(line.removeprefix("#   "))
    return {line.partition("=")[0]: line for line in lines}


VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.seed=1"


VARIABLES, OTHER_VALUES = {}, {}
for line in (FIRST.parent / "variables.tsv").read_text().splitlines()[1:]:
    name, its = line.split("=", 1)
    value, verdict = its.split("\t")
    (OTHER_VALUES if name in {one.partition("=")[0] for one in VARIABLES} else VARIABLES)[f"{name}={value}"] = verdict
WAYS = {  # a script that gives its command these variables
    "export": lambda given: "".join(f"export {one}\n" for one in given) + VERL,
    "env": lambda given: f"env {' '.join(given)} {VERL}",
    "docker": lambda given: f"docker run {' '.join(f'-e {one}' for one in given)} image bash -c '{VERL}'",
    "ray": lambda given: f"{VERL} {' '.join(f'+ray_kwargs.ray_init.runtime_env.env_vars.{one}' for one in given)}",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variables", [VARIABLES, OTHER_VALUES])
def test_an_exported_variable_has_a_line(way, variables):
    text = WAYS[way](variables)
    lines = section(text)
    for exported, verdict in variables.items():
        line = lines[exported.partition("=")[0]]
        assert line.startswith(f"{exported}: {verdict}"), (text, line)


def test_a_key_to_an_account_is_not_printed():
    printed = report(read_script(f"export WANDB_API_KEY=0123abc HF_TOKEN=hf_secret\n{VERL}"))
    assert "0123abc" not in printed and "hf_secret" not in printed and "WANDB_API_KEY=..." in printed
