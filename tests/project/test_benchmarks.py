"""The benchmarks run at toy size, and the tables in the docs match their results."""

import importlib
import json
import re
import subprocess
import sys

import pytest
from helpers import CHILDREN_FORK, ROOT, run_script

from rl import flags

# One process for all: importing torch and transformers is most of what each would cost. Those that start whole runs
# (demo, load, overlap, publish, startup, and trl's sides) are only imported: the scripts they start have tests of their own.
DRIVER = """
import sys
sys.path.insert(0, "benchmarks")
from pathlib import Path
from types import SimpleNamespace
from learning import hybrid, learner, load, logprobs, real_size
from device import measure
from scripts import checkpoint, demo, images, moe, overlap, staleness, startup, trl
from samples import ring
from weights import publish
from rl.ranks import dist

out = Path(sys.argv[1])
found = {}
images.main(images.Args(parts=("learner",), sizes=("toy",), rounds=1, out=out))

ranks = dist.init()
learner.main(learner.Args(sizes=("toy",), rounds=2, out=out), ranks)
hybrid.main(hybrid.Args(size="toy", budget=8, rounds=2, out=out), ranks)
real_size.main(real_size.Args(shape="toy", tokens=6, rounds=1, out=out), ranks)

sides = {side: logprobs.one_side(side, 64, 1000, 16) for side in logprobs.SIDES}
assert abs(sides["held"]["gradient"] - sides["chunked"]["gradient"]) < 1e-4 * sides["held"]["gradient"], sides

ring.main(ring.Args(repeats=1, total_mb=1, small=50, ray_messages=8, sizes=("4 KB",), out=out))

for flags in ([], ["--lora-rank", "4"]):
    args = SimpleNamespace(shape="toy", path=str(out / "toy"), text=str(out / "profile.txt"), toy=True, flags=flags)
    for name in ("learner", "publish") if flags else [name for name in measure.MEASUREMENTS if name != "vllm"]:
        found[name] = measure.MEASUREMENTS[name](args, ranks)
        assert found[name].get("tokens_per_s", 1) > 0 and found[name].get("equal to the bit", True), (name, found[name])
assert max(found["experts"]["off"]) < 0.02 and not any(found["packing"]["off"]), found
"""


@pytest.mark.runs
def test_benchmarks_run_at_toy_size(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    run_script(script, tmp_path / "out", timeout=120)
    assert {"learner.json", "learner.md", "ring.json", "ring.md"} <= {path.name for path in (tmp_path / "out").iterdir()}


def printed(program: str) -> str:
    """Return the output of a program that can import the benchmarks' modules."""
    command = [sys.executable, "-c", "import sys; sys.path.insert(0, 'benchmarks')\n" + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_pages_hold_the_tables_that_the_results_make():
    tables, headlines = json.loads(printed("import json, table; print(json.dumps([table.make(), len(table.HEADLINES)]))"))
    for page, table in tables.items():
        assert table in (ROOT / page).read_text(), "run python benchmarks/table.py"
    assert len(tables["docs/benchmarks.md"].splitlines()) == 2 + headlines, "a headline has no row, or two"


def test_the_readmes_numbers_are_those_of_the_results():
    """Each ratio is the median over rounds of its row, not the ratio of two medians."""
    readme = (ROOT / "README.md").read_text()
    numbers = re.findall(r"\| ([\d.,]*\d) \S+, \w+ ([\d.,]*\d) \S+: ([\d.]+)x faster", readme)
    assert len(numbers) == 2
    rows = [re.findall(r"[\d.,]*\d", row) for row in (ROOT / "docs" / "generated" / "benchmarks.md").read_text().splitlines()]
    for ours, theirs, faster in numbers:
        (ratio, *_) = (row[row.index(theirs) + 1] for row in rows if ours in row and theirs in row)
        ratios = {float(ratio), 1 / float(ratio)}  # of seconds a step, or of something a second
        assert any(float(faster) == pytest.approx(ratio, rel=0.03) for ratio in ratios), (faster, ours, theirs)
    demo = re.search(
        r"^\| sync \| ([\d.]+) .*? \| ([\d.]+) .*? \| (\d+) ", (ROOT / "benchmarks/results/demo.md").read_text(), re.M
    )
    before, after, seconds = map(float, demo.groups())
    assert f"{before:.0%} right before, {after:.0%} after 200 steps, in {seconds:.0f} s" in readme


STEPS = {  # word -> step; what the others measure is tested above, in one process
    "nvidia": "nvidia-smi",
    "save": "save, toy",
    "one device": "async, one device",
    "critic": "3 steps, critic, sync",
    "packing": "packing",
    "vllm": "vllm, toy",
}


@pytest.mark.slow
def test_the_measurements_for_a_device_run_at_toy_size(tmp_path):
    own = {"OUT": str(tmp_path / "out"), "KIT_WORK": str(tmp_path / "work")} | CHILDREN_FORK
    done = run_script("benchmarks/device/drive.py", 1, 2, 3, "--toy", "--only", ",".join(STEPS), env=own, timeout=290)
    records = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {record["step"]: record["code"] for record in records} == dict.fromkeys(STEPS.values(), 0)
    found = {record["step"]: record["found"] for record in records}
    assert found["vllm, toy"]["tokens_per_s"] > 0 and found["async, one device"]["steps"] == 3
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in done.stdout and all(f"| {name} | ok |" in table for name in STEPS.values())


def test_the_scripts_know_the_flags_of_each_run_for_a_device(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from device import steps

    plan = steps.Plan(tmp_path, tmp_path, toy=False)
    runs = [step for part in (1, 2, 3) for _, its in plan.part(part) for step in its if step.run]
    assert len({step.name for step in runs}) == len({step.run for step in runs}) == len(runs) > 20
    for step in runs:
        (at,) = (at for at, word in enumerate(step.command) if re.fullmatch(r"train_\w+\.py", word))
        flags.read(importlib.import_module(step.command[at].removesuffix(".py")).Args, args=step.command[at + 1 :])
        assert "warning" not in capsys.readouterr().err, step.command
