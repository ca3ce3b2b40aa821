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
SECRET = [
    f"env KEY={S} python a.py",
    f"env OPENAI_API_KEY={S} X=1 ./a --lr 0.5",
    f"MY_THING={S} cmd",
    f"/usr/bin/env MY_THING={S} TEMPERATURE=0.5 P=a/b cmd",
    f"env -i A_TOKEN={S} sh -c 'B_SECRET={S} run'",
    f"sh -c 'export HF_TOKEN={S}; run'",
    f'bash -c "KEY={S} run"',
    f'env PASSWORD="a {S} b" cmd',
    f"env A_PASSWORD=a\\ {S} cmd",
    f"env SECRETS={S},{S} x",
    f"env FOO={S}:{S} x",
    f"env X={S}&{S} cmd",
    f"AWS_ACCESS_KEY_ID={S} x",
    f"https://user:{S}@host/x",
    f"https://{S}@host/x",
    f"https://user:a@{S}@host/x",
    f"postgres://u:{S}@db/x",
    f"https://h/x?token={S}&a=b",
    f"https://h/v1?api-key={S}",
    f"https://h/?a=b&X-Amz-Signature={S}",
    f"https://h/?a=b#access_token={S}",
    f"cmd --api-key {S} --n 3",
    f"cmd --token={S}",
    f"cmd --apiKey {S}",
    f"cmd --password '{S} more'",
    f"a.py --key {S}",
    f"a --x y --secret-key {S}",
    f"cmd -H 'Authorization: Bearer {S}'",
    f"cmd --header X-Api-Key:{S}",
    f"echo X-Api-Key: {S}",
    f"curl -u bob:{S} http://x",
    f'cmd \'{{"api_key": "{S}", "n": 3}}\'',
    f"cmd {{token:{S}}}",
    f"cmd sk-{S}",
    f"cmd --id ghp_{S}",
    f"x:{'eyJ' + S}.{S}.{S}",
    f"a.py --wandb-key {S}",
    f"a.py --openai_key={S}",
    f"timeout 5 env FOO={S} a.py",
    f"bash -lc 'env FOO={S} a.py'",
    f'sh -c "FOO={S} a.py"',
    f"export A=1; DB_PW={S} a.py",
    f"curl -ubob:{S} http://x",
    f"curl -H 'Authorization: ApiKey {S}'",
    f'cmd "{{\\"api_key\\": \\"{S}\\"}}"',
    f"python -c \"os.environ['API_KEY']='{S}'\"",
    f"cmd --id npm_{S}0123456789",
    f"cmd --id wandb_v1_{S}0123456789",
]
PLAIN = [
    "path/to/file.py:Class",
    "python agent.py --max-tokens 512 --model a/b",
    "env OMP_NUM_THREADS=1 DEBUG=true python a.py --seed=3 --prompt-key question",
    "http://localhost:8000/v1",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "python -u a.py http://localhost:8000",
    "docker run -u 1000 image",
    "a.py --mask-key m --reward-fn-key data_source --sort-keys --primary-key id",
    "a sentence: with a colon",
    "max_tokens=4 tokenizer=a/b keep_sampling_mask=True",
    "git+https://github.com/a/b@main",
    "",
]


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

    from rl.record import wandb_log

    fake = SimpleNamespace(init=init, errors=SimpleNamespace(Error=OSError))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    wandb_log.WandB(args, tmp_path, ())
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
    flags += ["--save-freq", 1, "--record-samples", tmp_path / "samples", "--env-timeout", 120]

    def run(key: str, check: bool = True):
        agent = f"env MY_KEY={key} {sys.executable} {tmp_path}/agent.py"
        return run_script(ROOT / "train_sync.py", *flags, "--agent", agent, check=check)

    said = run(S)
    written = [file for file in tmp_path.rglob("*") if file.is_file() and S.encode() in file.read_bytes()]
    assert not written and S not in said.stdout + said.stderr
    run(S)
    other = run("another0Secret", check=False)
    assert other.returncode == 1 and "--agent" in other.stderr and "another0Secret" not in other.stderr
