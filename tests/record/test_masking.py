"""Secrets do not reach what a run writes down, and a changed one is noticed."""

import json
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT, run_script

import train_sync
from rl import parts
from rl.masking import masked
from rl.record.provenance import describe_run

S = "hunter2Secret"
ROWS = [line.split("\t") for line in (ROOT / "tests" / "fixtures" / "secrets.txt").read_text().splitlines()[1:]]
SECRET, PLAIN = ([text.replace("<S>", S) for kind, text in ROWS if kind == wanted] for wanted in ("secret", "plain"))


@pytest.mark.parametrize("text", SECRET)
def test_a_secret_is_replaced_wherever_it_stands(text):
    hidden = masked(text)
    assert S not in hidden and masked(hidden) == hidden
    assert masked(text.replace(S, "another0Secret")) != hidden
    assert S not in json.dumps(masked({"a": [1, (text, None)], "judge_api_key": S, "c": ["x.py", "--api-key", S]}))


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_stays(text):
    assert masked(text) == text
    assert masked({"prompt_key": text, "a": [text, 1, None]}) == {"prompt_key": text, "a": [text, 1, None]}


def test_what_is_written_of_a_run_has_none(monkeypatch, tmp_path):
    """The record in config.json, and what W&B gets: the command line is a part of both."""
    args = parts.replace(train_sync.Args(), agent=SECRET[1], project_name=f"https://u:{S}@host/v1?token={S}")
    monkeypatch.setattr(
        sys, "argv", ["train_sync.py", "--agent", args.environment.agent, f"--project-name={args.log.project_name}"]
    )
    record = describe_run(args, {}, "train_sync")
    assert S not in json.dumps(record, default=str) and "OPENAI_API_KEY=***" in record["flags"]["agent"]
    seen = {}

    def init(config, **_):
        seen.update(config=config, argv=[*sys.argv])
        return SimpleNamespace(id="1", define_metric=lambda *_, **__: None)

    from rl.record import loggers

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    loggers.opened(parts.replace(args, logger=("wandb",)), tmp_path, 0)
    assert S not in json.dumps(seen, default=str) and seen["config"]["lr"] == args.learner.lr
    assert S in " ".join(sys.argv)


AGENT = """
import json, os, sys, urllib.request
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "1+1="}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)).read()
print(json.dumps({"reward": 1.0}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_an_agent_s_key_writes_it_nowhere_and_resumes_only_with_it(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    flags = ["--output-dir", tmp_path / "runs", "--experiment-name", "run", "--total-training-steps", 1, "--test-freq", 0]
    flags += ["--save-freq", 1, "--env-timeout", 120, "--train-batch-size", 2, "--rollout-n", 2]

    def run(key: str, check: bool = True):
        agent = f"env MY_KEY={key} {sys.executable} {tmp_path}/agent.py"
        return run_script(ROOT / "train_sync.py", *flags, "--agent", agent, check=check)

    said = run(S)
    written = [file for file in tmp_path.rglob("*") if file.is_file() and S.encode() in file.read_bytes()]
    assert not written and S not in said.stdout + said.stderr
    run(S)
    other = run("another0Secret", check=False)
    assert other.returncode == 1 and "--agent" in other.stderr and "another0Secret" not in other.stderr
