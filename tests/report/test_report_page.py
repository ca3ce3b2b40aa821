"""docs/report.md: the report prints the quoted sentences and the named columns, and accepts the commands."""

import re
import shlex

import numpy as np
import pytest
import tyro
from helpers import ROOT
from test_report_speed import group, run
from test_report_verl import async_log, console

from report import Args
from tools.report.conclusions import conclude, overview
from tools.report.logs import Log, RunGroup, load

PAGE = (ROOT / "docs" / "report.md").read_text()
WAITS = {"fully_async/trainer/idle_ratio": 0.36, "fully_async/rollouter/idle_ratio": 0.48}
WAITS |= {"fully_async/rollouter/held_ratio": 0.4, "fully_async/count/max_required_samples": 307}
WAITS |= {"ledger/generator_0/wait": 0.48, "ledger/learner_0/wait": 0.36}
WAITS |= {"staleness/mean": 0.7, "staleness/max": 2}


def noisy(name: str, steps: int, seconds: float, tokens: float, ranks: int, mfu: float, **more) -> Log:
    """A run whose steps differ by a few percent, always the same."""
    random = np.random.default_rng(len(name))
    took, of, used = (mean * random.lognormal(0, 0.04, steps) for mean in (seconds, tokens, mfu))
    log = run(name, took.tolist(), of.tolist(), ranks, {"script": name, "flags": {"staleness_threshold": 0.2}}, **more)
    for row, value in zip(log.rows, used, strict=True):
        row["perf/mfu/actor"] = value
    return log


def pair(steps: int = 40, ranks: int = 4, speed: float = 1.0) -> list[RunGroup]:
    """The first seed's two runs: 365 and 1,225 tokens/s."""
    sync = noisy("train_sync", 58, 625, 228_125, 4, 0.012)
    fast = noisy("train_async", steps, 355 / speed, 434_875, ranks, 0.053, **WAITS)
    return [group("train_sync", sync), group("train_async", fast)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> tuple[set[str], set[str]]:
    """Return (conclusions, columns) of runs like those on the page."""
    alike = pair(speed=355 / 625 * 228_125 / 434_875)
    verl = load(console(tmp_path_factory.mktemp("verl") / "async.log", async_log()))
    a_rank = run("a", [1.0] * 30, [9.0] * 30)
    for row in a_rank.rows:
        del row["perf/total_num_tokens"]
    compared = [pair(), pair(steps=58), pair(ranks=8), pair(steps=11), alike, [group("async.log", verl)], [group("a", a_rank)]]
    said = {text for groups in compared for _, text, _ in conclude(groups)}
    return said, {head for groups in compared for head in overview(groups, 10)[0]}


def test_every_sentence_that_is_quoted_is_a_report_s(reports):
    quoted = re.findall(r"^> (.*)$", PAGE, re.M)
    assert len(quoted) >= 6
    for sentence in quoted:
        assert sentence in reports[0], sentence


def test_every_column_that_is_named_is_a_report_s(reports):
    table = PAGE.partition("## The table of groups")[2].partition("\n\n")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(named) == 11
    assert not set(named) - reports[1]


def test_its_commands_are_taken():
    commands = re.findall(r"^    python report\.py ([^#\n]+)", PAGE, re.M)
    assert len(commands) == 5
    for command in commands:
        assert tyro.cli(Args, args=shlex.split(command)).runs


def test_the_example_has_todays_columns_and_conclusions(reports):
    """If they change, regenerate it: python benchmarks/scripts/report_demo.py. On a CPU the MFU is unknown."""
    text = (ROOT / "examples" / "report" / "report.md").read_text()
    head = re.search(r"^\| (group \|.*) \|$", text, re.M)[1].split(" | ")
    assert {*head} == reports[1] - {"MFU", "tokens/s a rank, median step"}
    assert re.search(r"makes [\d.]+x the tokens/s|tokens/s of all ranks: ", text)
    assert re.search(r"the staleness bound of \d+ samples held", text) and "versions of the weights old" in text
    images = re.findall(r"\]\(([\w.]+\.png)\)", text)
    assert {path.name for path in (ROOT / "examples" / "report").glob("*.png")} == {*images}
