"""The benchmarks run at toy size, and the tables in the docs match their results."""

import json
import re
import subprocess
import sys

import pytest
from helpers import ROOT, environment, run_script

# One process for all: importing torch and transformers is most of what each would cost. Those that start whole runs
# (demo, load, overlap, publish, startup, and trl's sides) are only imported: the scripts they start have tests of their own.
# What overlap.py leaves out of a script is tested below.
DRIVER = """
import sys
sys.path.insert(0, "benchmarks")
from pathlib import Path
from learning import hybrid, learner, load, logprobs, real_size
from scripts import checkpoint, demo, gpu, images, moe, overlap, staleness, startup, trl
from samples import ring
from weights import publish
from rl.ranks import dist

out = Path(sys.argv[1])
images.main(images.Args(parts=("learner",), sizes=("toy",), rounds=1, out=out))

ranks = dist.init()
learner.main(learner.Args(sizes=("toy",), rounds=2, out=out), ranks)
hybrid.main(hybrid.Args(size="toy", budget=8, rounds=2, out=out), ranks)
real_size.main(real_size.Args(shape="toy", tokens=6, rounds=1, out=out), ranks)

sides = {side: logprobs.one_side(side, 64, 1000, 16) for side in logprobs.SIDES}
assert abs(sides["held"]["gradient"] - sides["chunked"]["gradient"]) < 1e-4 * sides["held"]["gradient"], sides

ring.main(ring.Args(repeats=1, total_mb=1, small=50, ray_messages=8, sizes=("4 KB",), out=out))

gpu.save("toy", str(out / "toy"))
for part in (gpu.learner, gpu.engine):
    r = part(gpu.Args(toy=True, shape="toy", path=str(out / "toy"), repeats=1), ranks)
    assert r["tokens_per_s"] > 0 and len(gpu.row("x", "toy", r)) == len(gpu.HEAD)
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


@pytest.mark.slow
@pytest.mark.parametrize("side", ["generation", "training"])
def test_a_side_of_overlap_leaves_out_just_the_other_half(side, tmp_path):
    flags = ["--total-training-steps", 3, "--test-freq", 0, "--max-response-length", 6, "--output-dir", tmp_path]
    run_script("benchmarks/scripts/overlap.py", "--side", side, "6/6", *flags, ranks=2, timeout=120)
    (file,) = tmp_path.glob("*/metrics.jsonl")
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if row["step"]]
    assert len(rows) == 3 and all(("actor/loss" in row) == (side == "training") for row in rows)
    if side == "training":  # what its engine says of each token
        assert all(row["rollout_corr/rollout_log_ppl"] == pytest.approx(2.3) for row in rows)


@pytest.mark.slow
def test_every_part_of_the_benchmark_on_a_gpu_runs_at_toy_size():
    command = [sys.executable, "benchmarks/scripts/gpu.py", "--toy", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    table = done.stdout[done.stdout.rindex("| what") :]
    for part in ("learner", "learner, gradient checkpointing", "embedded engine", "vLLM", "async, one device"):
        assert f"| {part} |" in table
    assert "Error" not in table and "WRONG" not in table
