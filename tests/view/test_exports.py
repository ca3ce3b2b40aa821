"""Recorded responses in other viewers' formats hold what was recorded: turns, tokens, log-probs, scores."""

import json

import numpy as np
import pytest
from test_view import ATTACKS, Letters, run  # noqa: F401  (run: a fixture)

from tools.view import exports
from tools.view.rows import Samples


def written(run, kind: str, file, steps=range(9)) -> str:  # noqa: F811
    assert exports.write(file, kind, [run], steps) == 6 * len([step for step in (1, 2, 3) if step in steps])
    return file.read_text()


def recorded(run) -> list:  # noqa: F811
    samples = Samples(run)
    return [(group, r) for step in samples.record.steps for group in samples.groups(step) for r in group.responses]


def test_a_trajectory_has_the_turns_of_a_response(run, tmp_path):  # noqa: F811
    lines = [json.loads(line) for line in written(run, "atif", tmp_path / "out").splitlines()]
    assert len({line["trajectory_id"] for line in lines}) == len(lines)
    for line, (group, response) in zip(lines, recorded(run), strict=True):
        assert [turn["step_id"] for turn in line["steps"]] == [*range(1, len(line["steps"]) + 1)]
        prompt, *turns = line["steps"]
        assert prompt["source"] == "user" and prompt["message"] == Letters().decode(group.prompt_ids)
        by_policy = [turn for turn in turns if turn["source"] == "agent"]
        mask = np.ones(len(response.token_ids), bool) if response.mask is None else response.mask
        for name, expected in (("completion_token_ids", response.token_ids), ("logprobs", response.log_probs)):
            assert [x for turn in by_policy for x in turn["metrics"][name]] == expected[mask].tolist()
        said = ""
        for turn in turns:
            added = turn.get("observation", {"results": []})["results"]
            said += turn["message"] + "".join(result["content"] for result in added)
        assert said == Letters().decode(response.token_ids)
        assert line["extra"]["score"] == response.score and line["extra"]["error"] == response.error
        assert line["extra"]["where"] == f"{ATTACKS[0]} row {group.ticket % 10}"
        assert line["final_metrics"]["total_completion_tokens"] == mask.sum()
    assert max(len(line["steps"]) for line in lines) > 2, "there are several turns"


def test_a_log_of_inspect_has_a_sample_for_each_response(run, tmp_path):  # noqa: F811
    log = json.loads(written(run, "inspect", tmp_path / "out.json"))
    assert (log["version"], log["status"], log["eval"]["model"]) == (2, "success", "demo")
    assert len({(sample["id"], sample["epoch"]) for sample in log["samples"]}) == 18
    for sample, (group, response) in zip(log["samples"], recorded(run), strict=True):
        assert sample["input"] == Letters().decode(group.prompt_ids) and sample["target"] == ATTACKS[1]
        assert "".join(message["content"] for message in sample["messages"][1:]) == Letters().decode(response.token_ids)
        value = sample["scores"]["reward"]["value"]
        assert value == ("not scored" if response.score is None else response.score)


def test_inspect_reads_it(run, tmp_path):  # noqa: F811
    log = pytest.importorskip("inspect_ai.log", reason="inspect_ai is not installed")
    written(run, "inspect", tmp_path / "out.json")
    found = log.read_eval_log(str(tmp_path / "out.json"))
    assert len(found.samples) == 18 and found.samples[1].scores["reward"].value == 1.0


def test_steps_and_runs_are_chosen(run, tmp_path):  # noqa: F811
    rows = [json.loads(line) for line in written(run, "jsonl", tmp_path / "out", range(2, 3)).splitlines()]
    assert {row["step"] for row in rows} == {2} and {row["run"] for row in rows} == {"run"}
    assert exports.write(tmp_path / "both", "atif", [run, run], range(9)) == 36
