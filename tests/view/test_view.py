"""What a run wrote, shown as text: rows equal what was recorded, the page shows them in a browser, and no text is ever HTML."""

import asyncio
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from helpers import ROOT, make_group
from transformers import AutoTokenizer

import view
from rl.errors import UserError
from rl.record import validations
from rl.samples.recorder import Recorder
from tools.view import server
from tools.view.answers import Answers
from tools.view.rows import Samples, read

ATTACKS = [
    "<img src=x onerror=\"document.title='hacked'\">",
    "</script><script>document.title='hacked'</script>",
    "<!--<script>",
    "\u2028\u2029'\"`${document.title='hacked'}",
    "javascript:document.title='hacked'",
]


class Letters:
    """A tokenizer with a token for each character, and for each attack."""

    def encode(self, text: str, **_) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids, **_) -> str:
        return "".join(ATTACKS[i - 1000] if i >= 1000 else chr(i) for i in ids)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of three steps with two prompts, which come again in every step; response 1 of each group has an attack, its last
    response could not be scored."""
    (tmp_path / "script.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])
    run = tmp_path / "run"
    run.mkdir()
    recorder = Recorder(run, 0, True)
    recorder.begin({"after": 0, "flags": {"model": "demo", "trust_remote_code": False}})
    groups_file, metrics = (run / "groups.jsonl").open("w"), (run / "metrics.jsonl").open("w")
    for step in (1, 2, 3):
        groups = [
            make_group(10 * step + i, [9, 6, 4], rng=np.random.default_rng(step), masked=i == 1, unscored=(2,)) for i in (0, 1)
        ]
        for group in groups:
            group.prompt_ids[:] = 65 + np.arange(len(group.prompt_ids)) % 26
            for number, response in enumerate(group.responses):
                response.token_ids[:] = 97 + np.arange(len(response.token_ids)) % 26
                if number == 1:
                    response.token_ids[: len(ATTACKS)] = 1000 + np.arange(len(ATTACKS))
        recorder.write(step, groups)
        rows = [
            {
                "ticket": group.ticket,
                "epoch": step - 1,
                "index": i,
                "source": group.data_source,
                "where": f"{ATTACKS[0]} row {i}",
            }
            | {"ground_truth": ATTACKS[1], "scores": [r.score for r in group.responses], "lengths": [9, 6, 4]}
            for i, group in enumerate(groups)
        ]
        groups_file.write(json.dumps({"step": step, "groups": rows}) + "\n")
        metrics.write(json.dumps({"step": step, "critic/score/mean": 0.25 * step, "actor/grad_norm": None}) + "\n")
    groups_file.close()
    metrics.close()
    for step, scores in ((0, (0.0, 1.0)), (3, (1.0, None))):
        rows = [{"prompt": f"p{i}", "response": ATTACKS[i], "ground_truth": "t", "score": x} for i, x in enumerate(scores)]
        validations.write_responses(run, step, rows)
    monkeypatch.setattr(Samples, "tokenizer", Letters())
    return run


def test_a_row_is_what_was_recorded(run):
    samples = Samples(run)
    rows = list(read(run))
    assert [row["step"] for row in rows] == [1] * 6 + [2] * 6 + [3] * 6
    groups = [(group, response) for step in (1, 2, 3) for group in samples.groups(step) for response in group.responses]
    for row, (group, response) in zip(rows, groups, strict=True):
        assert (row["ticket"], row["source"], row["score"], row["error"]) == (
            group.ticket,
            group.data_source,
            response.score,
            response.error,
        )
        assert row["prompt"] == Letters().decode(group.prompt_ids) and row["response"] == Letters().decode(response.token_ids)
        assert "".join(text for _, text in row["parts"]) == row["response"]
        by_policy = "".join(text for who, text in row["parts"] if who == "policy")
        mask = slice(None) if response.mask is None else response.mask
        assert by_policy == Letters().decode(response.token_ids[mask])
        assert row["tokens"] == len(response.token_ids) and row["versions"] == [
            response.versions.min(),
            response.versions.max(),
        ]
        assert json.loads(json.dumps(row)) == row
    assert [row["step"] for row in read(run, [2])] == [2] * 6
    with pytest.raises(UserError, match="is no run that recorded its samples"):
        next(read(run.parent / "nowhere"))


@pytest.mark.parametrize("text", ["What is 62 \u00d7 3? 😀 naïve 中文\n  x", "<|user|> a</s>", "", "e\u0301 👩‍👩‍👧 \ufffd"])
def test_the_texts_of_tokens_join_to_the_whole(run, text):
    class Bytes:  # every byte is a token
        def encode(self, text: str, **_) -> list[int]:
            return list(text.encode())

        def decode(self, ids, **_) -> str:
            return bytes(ids).decode(errors="replace")

    samples = Samples(run)
    samples.tokenizer = Bytes()
    ids = list(text.encode())
    for end in range(len(ids) + 1):  # a response may be cut within a character
        pieces = samples.pieces(ids[:end])
        assert len(pieces) == end and "".join(pieces) == samples.text(ids[:end])


def test_the_texts_of_a_real_tokenizer_join_to_the_whole(run, demo_model):
    samples = Samples(run)
    samples.tokenizer = AutoTokenizer.from_pretrained(demo_model)
    ids = samples.tokenizer("<|user|>12+3=<|assistant|>15<|end|>")["input_ids"]
    assert "".join(samples.pieces(ids)) == samples.text(ids) == "<|user|>12+3=<|assistant|>15<|end|>"


def test_the_answers_are_what_the_groups_say(run):
    answers = Answers([run])
    (of_run,) = answers("runs")
    assert (
        of_run["curves"]["critic/score/mean"] == [[1, 0.25], [2, 0.5], [3, 0.75]] and "actor/grad_norm" not in of_run["curves"]
    )
    groups = {step: answers(f"step?run=0&step={step}")["groups"] for step in (1, 2, 3)}
    assert [group["change"] for group in groups[1]] == [None, None] and [group["visits"] for group in groups[3]] == [3, 3]
    for i in (0, 1):
        assert groups[3][i]["change"] == pytest.approx(groups[3][i]["score"] - groups[2][i]["score"])
        assert [row["steps"] for row in answers("prompts?run=0")] == [[1, 2, 3]] * 2
        assert [visit["ticket"] for visit in answers(f"prompt?run=0&index={i}")] == [10 + i, 20 + i, 30 + i]
    rows = answers("validation?run=0&step=3")
    assert of_run["validated"] == [0, 3] and [(row["score"], row["before"]) for row in rows] == [(1.0, 0.0), (None, 1.0)]
    group = answers("group?run=0&step=2&ticket=21")
    recorded = Samples(run).groups(2)[1]
    for row, response in zip(group["responses"], recorded.responses, strict=True):
        assert row["ids"] == response.token_ids.tolist() and row["log_probs"] == pytest.approx(response.log_probs, abs=1e-4)
        assert "".join(row["pieces"]) == row["response"]
    known = [score for score in (row["score"] for row in group["responses"]) if score is not None]
    assert (
        group["advantages"][:2] == pytest.approx([score - np.mean(known) for score in known]) and group["advantages"][2] is None
    )
    for path in (
        "group?run=0&step=2&ticket=99",
        "step?run=7&step=1",
        "nothing",
        "step?run=0",
        "step?run=0&step=x",
        "__class__",
    ):
        with pytest.raises(UserError, match="no answer to"):
            answers(path)


@pytest.mark.slow
def test_the_page_shows_a_response_and_runs_no_text_of_it(run, tmp_path):
    """In a browser, as a file."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium is installed")
    page = tmp_path / "page.html"
    server.as_file(Answers([run]), range(1, 4), page)

    def shown(place: str) -> str:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path / 'browser'}", f"{page.as_uri()}#{place}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert not done.returncode, done.stderr[-2000:]
        assert re.search(r"<title>run</title>", done.stdout), "the title is the run's, so no attack has changed it"
        return done.stdout.partition("<main>")[2].partition("</main>")[0]

    assert "critic/score/mean: 0.250 → 0.750" in shown("/0") and "<svg" in shown("/0")
    assert "change since last visit" in shown("/0/step/3") and "&lt;img src=x" in shown("/0/prompt/0")
    assert "&lt;img src=x" in shown("/0/validation") and "<img" not in shown("/0/validation/0")
    group = shown("/0/step/3/31")
    assert group.count('class="response') == 3 and "&lt;/script&gt;&lt;script&gt;" in group and "<img" not in group
    assert "this file does not have it" in shown("/0/step/3/99")


def test_the_server_answers_at_its_secret_address_alone(run):
    async def asked() -> None:
        async with TestClient(TestServer(server.application(Answers([run]), "secret"))) as client:
            page = await client.get("/secret/")
            policy = page.headers["Content-Security-Policy"]
            nonce = re.search(r"script-src 'nonce-(\w+)'", policy)[1]
            assert "default-src 'none'" in policy and f'<script nonce="{nonce}">' in await page.text()
            answer = await client.get("/secret/answers/step?run=0&step=2")
            assert (await answer.json())["step"] == 2
            assert (await client.get("/secret/answers/step?run=0&step=99")).status == 404
            for path in ("/", "/wrong/", "/answers/runs", "/secret/../", "/secret/answers/../../etc/passwd"):
                assert (await client.get(path)).status == 404

    asyncio.run(asked())


@pytest.mark.parametrize("words", ["x", "5-x", "-", "", "3-2-1"])
def test_steps_that_are_none_are_named(words):
    with pytest.raises(UserError, match="--steps"):
        view.range_of(words)
    assert list(view.range_of("7")) == [7] and list(view.range_of("7-9")) == [7, 8, 9]


@pytest.mark.runs
def test_a_run_is_shown_as_its_user_starts_it(demo_model, tmp_path):
    from helpers import run_script, train

    _, run, _ = train("train_sync.py", "--total-training-steps", 2, "--test-freq", 0, out=tmp_path / "runs")
    said = run_script("view.py", run, "--jsonl", tmp_path / "rows.jsonl").stdout
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert "128 responses" in said and len(rows) == 128
    for row in rows:
        a, b = re.match(r"<\|user\|>(\d+)\+(\d+)=", row["prompt"]).groups()
        assert row["ground_truth"] == str(int(a) + int(b)), "the truth is its own prompt's"
        assert row["score"] == (row["response"].removesuffix("<|end|>") == row["ground_truth"])
    done = run_script("view.py", tmp_path, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and str(ROOT) not in done.stderr
