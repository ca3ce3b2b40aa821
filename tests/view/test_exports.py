"""Recorded responses in other viewers' formats hold what was recorded: turns, tokens, log-probs, scores."""

import json
import sys

import numpy as np
import pytest
from helpers import make_group

from rl.samples.recorder import Recorder
from tools.view import exports
from tools.view.rows import Samples


class Letters:
    def decode(self, ids, **_) -> str:
        return "".join(chr(i + 60) for i in ids)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two steps; the third response of a group could not be scored, the second has parts of an environment."""
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])
    monkeypatch.setattr(Samples, "tokenizer", Letters())
    run = tmp_path / "run"
    run.mkdir()
    recorder = Recorder(run, 0, True)
    recorder.begin({"after": 0, "flags": {"model": "some/model", "trust_remote_code": False}})
    with (run / "groups.jsonl").open("w") as file:
        for step in (1, 2):
            groups = [make_group(10 * step + i, [9, 20, 4], masked=i == 1, unscored=(2,)) for i in (0, 1)]
            recorder.write(step, groups)
            about = {"epoch": 0, "where": "rows.jsonl row 3", "ground_truth": "42"}
            file.write(json.dumps({"step": step, "groups": [about | {"ticket": group.ticket} for group in groups]}) + "\n")
    return run


def written(run, kind: str, file, steps=range(9)) -> str:
    assert exports.write(file, kind, [run], steps) == 6 * len([step for step in (1, 2) if step in steps])
    return file.read_text()


def recorded(run) -> list:
    samples = Samples(run)
    return [(group, r) for step in samples.record.steps for group in samples.groups(step) for r in group.responses]


def test_a_trajectory_has_the_turns_of_a_response(run, tmp_path):
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
        assert line["extra"]["where"] == "rows.jsonl row 3" and line["final_metrics"]["total_completion_tokens"] == mask.sum()
    assert max(len(line["steps"]) for line in lines) > 3, "there are several turns"


def test_a_log_of_inspect_has_a_sample_for_each_response(run, tmp_path):
    log = json.loads(written(run, "inspect", tmp_path / "out.json"))
    assert (log["version"], log["status"], log["eval"]["model"]) == (2, "success", "some/model")
    assert len({(sample["id"], sample["epoch"]) for sample in log["samples"]}) == 12
    for sample, (group, response) in zip(log["samples"], recorded(run), strict=True):
        assert sample["input"] == Letters().decode(group.prompt_ids) and sample["target"] == "42"
        assert "".join(message["content"] for message in sample["messages"][1:]) == Letters().decode(response.token_ids)
        value = sample["scores"]["reward"]["value"]
        assert value == ("not scored" if response.score is None else response.score)


def test_inspect_reads_it(run, tmp_path):
    log = pytest.importorskip("inspect_ai.log", reason="inspect_ai is not installed")
    written(run, "inspect", tmp_path / "out.json")
    found = log.read_eval_log(str(tmp_path / "out.json"))
    assert len(found.samples) == 12 and found.samples[1].scores["reward"].value == 1.0


def test_steps_and_runs_are_chosen(run, tmp_path):
    rows = [json.loads(line) for line in written(run, "jsonl", tmp_path / "out", range(2, 3)).splitlines()]
    assert {row["step"] for row in rows} == {2} and {row["run"] for row in rows} == {"run"}
    assert exports.write(tmp_path / "both", "atif", [run, run], range(9)) == 24
