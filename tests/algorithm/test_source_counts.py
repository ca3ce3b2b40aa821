"""Counters by data source: every script, on one rank or several, counts each response of a settled ticket once. Data with very
many sources makes no more metrics than data with a few."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import make_group, run_script

from rl.algorithm.health import KINDS, MOST, OTHERS, Fates, SourceCounts
from rl.learning.batch import Batch

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    if data_source == "broken":
        raise ValueError("no score here")
    return 1.0 if data_source == "equal" else float(sum(map(ord, solution_str)) % 7)
"""


def write(path: Path, sources: list[str]) -> Path:
    """A row of each, in turn."""
    rows = [
        {"data_source": s, "prompt": f"{i % 9}+{i % 7}=", "ground_truth": "1", "extra_info": {}} for i, s in enumerate(sources)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counted(row: dict) -> dict[str, Counter]:
    """source -> kind -> count, of a line of metrics.jsonl."""
    out: dict[str, Counter] = {}
    for name, value in row.items():
        if name.startswith("data/"):
            source, _, kind = name.removeprefix("data/").rpartition("/")
            out.setdefault(source, Counter())[kind] = value
    return out


CASES = {
    "sync, filtered": ("train_sync.py", ["--filter-groups"], 2),
    "one step off, rejected": ("train_one_step_off.py", ["--rollout-rs", "seq_mean_k1", "--rollout-rs-threshold", "7_8"], 2),
    "one step off, filtered": ("train_one_step_off.py", ["--filter-groups"], 3),
    "async, too old": ("train_async.py", ["--max-staleness", "0", "--staleness-threshold", "2"], 3),
    "async, filtered": ("train_async.py", ["--filter-groups"], 3),
}


QUICK = ("sync, filtered", "async, too old")


@pytest.mark.runs
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in QUICK)])
def test_every_response_is_counted_once(case, tmp_path):
    script, flags, ranks = CASES[case]
    data = write(tmp_path / "rows.jsonl", ["mixed", "equal", "broken", "mixed"] * 8)
    (tmp_path / "reward.py").write_text(REWARD)
    size = ["--ppo-mini-batch-size" if script == "train_async.py" else "--train-batch-size", "4"]
    words = ["--train-files", data, "--reward", f"{tmp_path / 'reward.py'}:score", "--test-freq", "0", "--rollout-n", "4"]
    words += ["--total-training-steps", "4", *size, "--temperature", "1.5", "--max-num-gen-batches", "3"]
    words += ["--output-dir", tmp_path / "runs", "--experiment-name", "run"]
    run_script(script, *words, *flags, ranks=ranks)
    lines = {name: (tmp_path / "runs" / "run" / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "tickets")}
    steps = [counted(json.loads(line)) for line in lines["metrics"]]
    total = Counter()
    for step, line in zip(steps, map(json.loads, lines["tickets"]), strict=True):
        assert set(step) == {"mixed", "equal", "broken"} and all(set(of) == set(KINDS) for of in step.values())
        settled = sum(len(tickets) for name, tickets in line.items() if name != "step")
        assert sum(of.total() for of in step.values()) == 4 * settled
        for of in step.values():
            total += of
        assert not step["broken"]["trained"] and not step["equal"]["unscored"]
    lost = {source: sum((step[source] for step in steps), Counter()) for source in ("broken", "equal")}
    if "filtered" in case:
        assert lost["equal"]["filtered"] and lost["broken"]["filtered"], "neither has a signal"
    else:
        assert lost["broken"]["unscored"]
    if "rejected" in case:
        assert total["rejected"] > 0 and not total["trained"]
    else:
        assert total["trained"] > 0 and not total["rejected"]


class Prompts:
    """Rows of this many data sources; the first ones have the most."""

    def __init__(self, sources: int):
        self.sizes = {f"s{i}": 1000 - i for i in range(sources)}

    def source_sizes(self) -> dict[str, int]:
        return dict(reversed(self.sizes.items()))

    def source(self, index: int) -> str:
        return f"s{index}"


@pytest.mark.parametrize("sources", [1, MOST - 1, MOST, MOST + 1, 5000])
def test_there_are_no_more_metrics_than_for_a_few_sources(sources):
    groups = [make_group(ticket, [3, 2], unscored=(1,) if ticket % 2 else ()) for ticket in range(0, 40)]
    names = [f"s{min(ticket, sources - 1)}" for ticket in range(40)]
    groups = [type(g)(g.ticket, g.prompt_ids, name, g.responses) for g, name in zip(groups, names, strict=True)]
    batch = Batch.of(groups)
    batch.targets.advantage = torch.ones(len(batch.token))
    counts = SourceCounts(Prompts(sources), lambda ticket: (0, min(ticket, sources - 1)), responses=2)
    found = counted({n: v for n, v in counts.of_step(batch, Fates.of(batch), {"stale": [0, 3], "filtered": [39]}).items()})
    assert len(found) == min(sources, MOST) and (OTHERS in found) == (sources > MOST)
    assert set(found) - {OTHERS} == {f"s{i}" for i in range(min(sources, MOST if sources <= MOST else MOST - 1))}, "the largest"
    total = sum(found.values(), Counter())
    assert total == {"trained": 60, "unscored": 20, "dropped": 4, "filtered": 2}
    assert found["s0"]["trained"] >= 2 and found["s0"]["dropped"] >= 2
    if sources > MOST:
        assert found["s3"] == {"trained": 1, "unscored": 1, "dropped": 2, "rejected": 0, "filtered": 0}
        assert found[OTHERS]["filtered"] == 2


def test_a_response_with_one_trained_token_is_trained_and_one_without_is_rejected():
    batch = Batch.of([make_group(0, [2, 2, 2, 2])])
    batch.targets.advantage = torch.ones(8)
    batch.targets.rejected = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0]).bool()
    batch.targets.is_weight = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 2])
    fates = Fates.of(batch)
    assert fates.trained.tolist() == [True, False, False, True] and fates.rejected.tolist() == [False, True, True, False]
    assert fates.rejected_share == pytest.approx(6 / 8)
