"""What a run wrote, shown as text: rows equal what was recorded, the page shows them in a browser, and no text is ever HTML."""

import asyncio
import base64
import html
import io
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from helpers import ROOT, make_group
from transformers import AutoTokenizer

import view
from rl.errors import UserError
from rl.record import validations
from rl.samples.group import Group
from rl.samples.recorder import Recorder
from tools.view import explanations, pictures, server, texts
from tools.view.answers import CURVES, Answers
from tools.view.rows import Samples, read

ATTACKS = [
    "<img src=x onerror=\"document.title='hacked'\">",
    "</script><script>document.title='hacked'</script>",
    "<!--<script>",
    "\u2028\u2029'\"`${document.title='hacked'}",
    "javascript:document.title='hacked'",
]

# markup that would run a script, a line each
FORMS = list(map(json.loads, (ROOT / "tests" / "fixtures" / "markup.jsonl").read_text().splitlines()))
ENCODINGS = [
    str,
    html.escape,
    lambda text: html.escape(html.escape(text)),
    urllib.parse.quote,
    lambda text: urllib.parse.quote(urllib.parse.quote(text)),
    lambda text: json.dumps(text).replace("<", "\\u003c"),
    lambda text: "".join(f"&#x{ord(character):x};" for character in text),
]
EVERY_ATTACK = [*ATTACKS, *(encode(form) for encode in ENCODINGS for form in FORMS)]
TAGS = re.compile(
    r"a|b|button|details|div|fig(caption|ure)|h2|input|mark|p|polyline|select|option|span|summary|svg|table|tbody|t[dhr]"
)
ATTRIBUTES = re.compile(r"class|data-place|height|href|open|placeholder|points|stroke|style|title|type|width")


class Letters:
    """A tokenizer with a token for each character, and for each attack."""

    def encode(self, text: str, **_) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids, **_) -> str:
        return "".join(EVERY_ATTACK[i - 1000] if i >= 1000 else chr(i) for i in ids)


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
        rows = []
        for i, group in enumerate(groups):
            row = {"ticket": group.ticket, "epoch": step - 1, "index": i, "source": group.data_source, "lengths": [9, 6, 4]}
            row |= {"where": f"{ATTACKS[0]} row {i}", "prompt": f"{ATTACKS[2]} {i}", "ground_truth": ATTACKS[1]}
            rows.append(row | {"scores": [r.score for r in group.responses]})
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
        own = {"ticket": group.ticket, "source": group.data_source, "score": response.score, "error": response.error}
        assert {name: row[name] for name in own} == own
        assert row["prompt"] == Letters().decode(group.prompt_ids) and row["response"] == Letters().decode(response.token_ids)
        assert "".join(text for _, text in row["parts"]) == row["response"]
        by_policy = "".join(text for who, text in row["parts"] if who == "policy")
        mask = slice(None) if response.mask is None else response.mask
        assert by_policy == Letters().decode(response.token_ids[mask])
        versions = [response.versions.min(), response.versions.max()]
        assert row["tokens"] == len(response.token_ids) and row["versions"] == versions
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
    assert of_run["curves"]["critic/score/mean"] == [[1, 0.25], [2, 0.5], [3, 0.75]]
    assert "actor/grad_norm" not in of_run["curves"]
    groups = {step: answers(f"0/step/{step}")[0]["rows"] for step in (1, 2, 3)}
    assert [group["change"] for group in groups[1]] == [None, None] and [group["visits"] for group in groups[3]] == [3, 3]
    for i in (0, 1):
        assert groups[3][i]["change"] == pytest.approx(groups[3][i]["score"] - groups[2][i]["score"])
        (visited,) = answers(f"0/prompt/{i}")
        assert [(row["to"], row["score"]) for row in visited["rows"]] == [
            (f"step/{step}/{10 * step + i}", row["score"]) for step in (1, 2, 3) for row in groups[step] if row["index"] == i
        ]
    (every,) = answers("0/prompts")
    assert [(row["prompt"], row["visits"], row["last_score"]) for row in every["rows"]] == [
        (f"{ATTACKS[2]} {i}", 3, next(row["score"] for row in groups[3] if row["index"] == i)) for i in (0, 1)
    ]
    (found,) = answers("0/validation/3")
    assert answers("0/validation") == [found], "the last one"
    rows = found["rows"]
    assert of_run["validated"] == [0, 3] and [(row["score"], row["before"]) for row in rows] == [(1.0, 0.0), (None, 1.0)]
    group = answers("0/step/2/21")
    recorded = Samples(run).groups(2)[1]
    for row, response in zip(group["responses"], recorded.responses, strict=True):
        assert row["ids"] == response.token_ids.tolist()
        assert row["columns"]["log-prob"] == pytest.approx(response.log_probs, abs=1e-4)
        assert "".join(row["pieces"]) == row["response"]
    known = [score for score in (row["score"] for row in group["responses"]) if score is not None]
    assert group["advantages"] == [*(pytest.approx(score - np.mean(known)) for score in known), None]
    for path in ["0/step/2/99", "7/step/1", "nothing", "0/step", "0/step/x", "0/__class__", "0/step/2/21/0"]:
        with pytest.raises(UserError, match="no answer to"):
            answers(path)


def test_repetition_and_strange_characters_are_measured():
    assert texts.measures("", "")["compressed"] is None
    once, again = "one two three four five", "no no no no no no no no"
    assert texts.measures(again * 20, "")["compressed"] < 0.2 < 1 < texts.measures(once, "")["compressed"]
    mixed = "naïve да 中文 \ufffd\u202e\x00 😀\n"
    known = {"broken": 1, "control": 2, "symbol": 1}
    assert texts.measures(mixed, "How?")["strange"] == {"LATIN": 1, "CYRILLIC": 2, "CJK": 2} | known
    assert texts.measures(mixed, "это 日 é")["strange"] == known


def test_phrases_that_spread_come_with_scores():
    early, late = ("I do not know", 0.0), ("As an expert, the answer is 5<|end|>", 1.0)
    found = texts.phrases([early] * 9 + [late], [early] * 4 + [late] * 6)
    assert {"As an expert ,", "answer is 5 <|end|>"} <= {row["phrase"] for row in found}
    for row in found:
        assert (row["first"], row["last"], row["with"], row["without"]) == pytest.approx((0.1, 0.6, 1.0, 0.0))
    assert not any("know" in row["phrase"] for row in found), "it became rarer"
    assert texts.phrases([], []) == [] and len(texts.phrases([], [late])) > 0


def test_scores_by_length_count_every_response_once(run):
    rng = np.random.default_rng(0)
    lengths, scores, third = rng.integers(1, 100, 500), rng.random(500), rng.integers(0, 3, 500)
    scores[::7] = np.nan
    rows = texts.by_length(lengths, scores, third)
    assert len(rows) == 8 and sum(row["responses"] for row in rows) == 500
    for row in rows:
        here = (lengths >= row["from"]) & (lengths <= row["to"])
        assert row["responses"] == here.sum() and row["score"] == pytest.approx(np.nanmean(scores[here]))
        assert row["last"] == pytest.approx((here & (third == 2)).sum() / (third == 2).sum())
    by_length, spread = Answers([run])("0/words")
    assert "steps 1 to 1 and 3 to 3" in spread["note"] and sum(row["responses"] for row in by_length["rows"]) == 18
    assert texts.by_length(*np.zeros((3, 0))) == []


def test_a_search_finds_words_with_any_space_between_them(run):
    answers = Answers([run])
    letters = {row["number"]: row["response"] for row in answers("0/search/1/b")}
    assert set(letters) == {0, 2} and letters[0].startswith("abcd"), "response 1 begins with attacks"
    assert len(answers("0/search/1/B c  D")) == 4 and answers("0/search/1/b.d") == []


def test_curves_are_explained_in_the_words_of_the_docs():
    found = explanations.of([*CURVES, "val-core/openai/gsm8k/acc/mean@1", "nothing"])
    assert {*found} == {*CURVES, "val-core/openai/gsm8k/acc/mean@1"}
    assert "healthy: below 0.1" in found["response_length/clip_ratio"] and "`" not in "".join(found.values())


def test_images_of_a_prompt_are_those_of_its_row(run, tmp_path, monkeypatch):
    from datasets import Dataset
    from PIL import Image

    from rl import images

    data = io.BytesIO()
    Image.new("RGB", (2000, 10), (255, 0, 0)).save(data, "PNG")
    rows = [{"images": [{"bytes": data.getvalue(), "path": None}] * i} for i in range(3)]
    Dataset.from_list(rows).to_parquet(file := str(tmp_path / "rows.parquet"))
    flags = {"train_files": [file], "image_key": "images"}
    assert pictures.of_row(f"{file} row 0", flags) == []
    assert pictures.of_row(f"{file} row 0", flags | {"train_files": [f"{file}:2"]}) == []
    (first, second) = pictures.of_row(f"{file} row 2", flags)
    shown = images.to_rgb(base64.b64decode(first.removeprefix("data:image/png;base64,")))
    assert first == second and shown.shape == (3, pictures.MOST, 3) and (shown == (255, 0, 0)).all()
    refused = {f"{file} row 9": "cannot be read", f"{tmp_path}/other.parquet row 0": "is not here", "": "is not here"}
    for where, why in refused.items():
        with pytest.raises(UserError, match=why):
            pictures.of_row(where, flags)
    samples = Samples(run)
    ours = [np.frombuffer(data.getvalue(), np.uint8)]
    group = samples.groups(1)[0]
    responses = [replace(r, images=ours * 2) for r in group.responses]
    shown = replace(group, images="a digest", image_files=ours, responses=responses)
    with monkeypatch.context() as patch:
        patch.setattr(Samples, "_groups", lambda *_: [Group.from_bytes(shown.to_bytes())])
        found = Answers([run])("0/step/1/10")
        assert found["images"] == [first] and all(response["images"] == [first, first] for response in found["responses"])
    gone = replace(group, images="a digest")
    monkeypatch.setattr(Samples, "_groups", lambda *_: [gone])
    samples.record.starts[0]["flags"].update(flags)
    answers = Answers([run])
    answers.runs[0].record.starts[0]["flags"].update(flags)
    assert "is not here" in answers("0/step/1/10")["images_error"]


@pytest.fixture
def show(tmp_path):
    """A function that returns what Chromium makes of a page at a place: all of its HTML, scripts run."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium is installed")

    def html_of(page, place: str) -> str:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path / 'browser'}", f"{page.as_uri()}#{place}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert not done.returncode, done.stderr[-2000:]
        return done.stdout

    return html_of


@pytest.mark.slow
def test_the_page_shows_a_response_and_runs_no_text_of_it(run, show, tmp_path):
    """In a browser, as a file."""
    page = tmp_path / "page.html"
    server.as_file(Answers([run]), range(1, 4), page)

    def shown(place: str) -> str:
        found = show(page, place)
        assert re.search(r"<title>run</title>", found), "the title is the run's, so no attack has changed it"
        return found.partition("<main>")[2].partition("</main>")[0]

    assert "critic/score/mean: 0.250 → 0.750" in shown("/0") and "<svg" in shown("/0")
    assert "change since last visit" in shown("/0/step/3") and "&lt;img src=x" in shown("/0/prompt/0")
    assert "&lt;img src=x" in shown("/0/validation") and "<img" not in shown("/0/validation/0")
    group = shown("/0/step/3/31")
    assert group.count('class="response') == 3 and "&lt;/script&gt;&lt;script&gt;" in group and "<img" not in group
    assert "this file does not have it" in shown("/0/step/3/99")
    found = shown("/0/search/" + urllib.parse.quote("onerror"))
    assert found.count("<mark>onerror</mark>") == 6, "response 1 of each of 6 groups has it"
    assert "mean score with it" in shown("/0/words")


CLICKS = """
<script nonce="{nonce}">
const went = [];
const act = async (what) => {{
  what();
  await new Promise((done) => setTimeout(done, 400));
  went.push(location.hash);
}};
const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", {{ key, bubbles: true }}));
const click = (selector) => document.querySelector(selector).dispatchEvent(new MouseEvent("click", {{ bubbles: true }}));
setTimeout(async () => {{
  await act(() => {{
    const curve = document.querySelector("svg");
    const at = curve.getBoundingClientRect();
    curve.dispatchEvent(new MouseEvent("click", {{ bubbles: true, clientX: at.right - 4, clientY: at.top + 20 }}));
  }});
  await act(() => click("tr.row"));
  for (const key of ["j", "j", "k", "Escape"]) await act(() => press(key));
  await act(() => press("/"));
  went.push(document.activeElement.type);
  document.body.dataset.went = went.join(" ");
}}, 800);
</script>
"""


@pytest.mark.slow
def test_two_clicks_lead_from_a_curve_to_a_response_and_keys_go_on(run, show, tmp_path):
    page = tmp_path / "page.html"
    server.as_file(Answers([run]), range(1, 4), page)
    nonce = re.search(r'<script nonce="(\w+)"', page.read_text())[1]
    page.write_text(page.read_text().replace("</body>", CLICKS.format(nonce=nonce) + "</body>"))
    went = re.search(r'data-went="([^"]*)"', show(page, "/0"))[1].split()
    assert went[0] == "#/0/step/3", "the curve's last step"
    ticket = went[1].removeprefix("#/0/step/3/")
    assert ticket in ("30", "31")
    of_group = [f"#/0/step/3/{ticket}/{number}" for number in (1, 2, 1)]
    assert went[2:6] == [*of_group, "#/0/step/3"] and went[-1] == "search"


@pytest.mark.slow
def test_two_runs_turns_and_conversations_are_shown(run, show, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    groups = Samples(other).groups(3)
    groups = [replace(group, responses=[replace(r, token_ids=r.token_ids.copy()) for r in group.responses]) for group in groups]
    groups[0].responses[0].token_ids[4] = ord("X")
    groups[0] = replace(groups[0], ticket=35)  # of another seed: the prompt is in another place
    (other / "groups.jsonl").write_text((run / "groups.jsonl").read_text().replace('"ticket": 30', '"ticket": 35'))
    mask = np.array([True, True, False, True, False, False, True, True, True])
    seconds = [[0.5, 0.25], [1.0, 0.0], [2.0, 0.125]]
    groups[1].responses[0] = replace(groups[1].responses[0], mask=mask, histories=[4, 5], seconds=seconds)
    Recorder(other, 2, True).write(3, groups)
    columns = {"gap": np.float32([0.25] * 8 + [np.nan]), "odd": np.full(9, np.nan, np.float32)}
    np.savez(other / "samples" / "learner_000003_0.npz", ticket=[35], number=[0], length=[9], **columns)
    page = tmp_path / "page.html"
    server.as_file(Answers([run, other]), range(1, 4), page)
    text = show(page, "/0/step/3/30")
    assert re.findall(r'class="piece parts"[^>]*>(.)</span>', text) == ["e", "X"], "the first token that differs, in both"
    options = re.findall(r"<option>([^<]*)</option>", text.partition("<script")[0])
    assert options == ["nothing", "log-prob", "version", "gap"], "a column without numbers is left out"
    assert text.count("  gap 0.2500  ") == 8
    text = show(page, "/1/step/3/31")
    assert re.findall(r"<summary>([^<]*)</summary>", text.partition("response 1<")[0])[-6:] == [
        "turn 1: 2 tokens, sampled in 0.500 s, answered in 0.250 s",
        "environment: 1 tokens",
        "turn 2: 1 tokens, sampled in 1 s, answered in 0 s",
        "conversation 2, prompt: 2 tokens",
        "conversation 2, turn 3: 3 tokens, sampled in 2 s, answered in 0.125 s",
    ]
    assert show(page, "/0/prompt/0").count(">other</td>") == 3, "visits of both runs"


class Elements(HTMLParser):
    """The elements of a page, and their attributes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.mark.slow
def test_no_attack_becomes_an_element_or_a_script(run, show, tmp_path):
    """Attacks as responses, prompts, truths, sources, errors, names of numbers and metrics, and in the page's address."""
    assert len({*EVERY_ATTACK}) >= 300
    (control := tmp_path / "control.html").write_text(f"<title>x</title>{FORMS[0]}")
    assert "<title>hacked</title>" in show(control, ""), "a page that is not safe would be noticed"
    n = len(EVERY_ATTACK)
    group = make_group(11, [2] * n, rng=np.random.default_rng(0))
    group.prompt_ids[:] = 1000 + np.arange(4)
    responses = []
    for i, response in enumerate(group.responses):
        response.token_ids[:] = 65, 1000 + i
        attack = EVERY_ATTACK[i]
        responses.append(replace(response, extra={attack: 1.0}, **({"score": None, "error": attack} if i % 3 == 0 else {})))
    group = replace(group, responses=responses, data_source=EVERY_ATTACK[0])
    Recorder(run, 3, True).write(4, [group], [replace(group, ticket=12)])
    about = {"ticket": 11, "epoch": 0, "index": 7, "source": EVERY_ATTACK[8], "where": " ".join(EVERY_ATTACK)}
    about |= {"ground_truth": EVERY_ATTACK[9], "scores": [r.score for r in responses], "lengths": [2] * n}
    rows = [about, about | {"ticket": 12, "left_out": EVERY_ATTACK[10]}]
    with (run / "groups.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "groups": rows}) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4} | {f"val-core/{attack}/acc/mean@1": 0.5 for attack in EVERY_ATTACK}) + "\n")
    names = ("prompt", "response", "ground_truth")
    validations.write_responses(run, 4, [dict.fromkeys(names, attack) | {"score": 1.0} for attack in EVERY_ATTACK])
    page = tmp_path / "page.html"
    server.as_file(Answers([run, run]), range(1, 5), page)
    searched = [f"search/{urllib.parse.quote(attack, safe='')}" for attack in (EVERY_ATTACK[0], FORMS[-1])]
    places = ("", "step/4", "step/4/11", "step/4/12/3", "prompts", "prompt/7", "validation/4", "words", *searched)
    for place in (*places, *EVERY_ATTACK[:2]):
        text = show(page, f"/0/{place}")
        assert re.search(r"<title>run, run</title>", text), place
        body = text.partition("<body>")[2]
        shown, _, rest = body.partition('<script id="answers"')
        assert rest.count("<script") == 1 + rest.count('\\"<script'), "the answers and the page's own script"
        elements = Elements()
        elements.feed(shown)
        assert len(elements.found) > 10 or place in EVERY_ATTACK
        for tag, attributes in elements.found:
            assert TAGS.fullmatch(tag) or tag in ("header", "main", "dialog"), (place, tag)
            assert all(map(ATTRIBUTES.fullmatch, attributes)), (place, attributes)
            assert attributes.get("href", "#/").startswith("#/"), (place, attributes)


def test_the_server_answers_at_its_secret_address_alone(run):
    async def asked() -> None:
        async with TestClient(TestServer(server.application(Answers([run]), "secret"))) as client:
            page = await client.get("/secret/")
            policy = page.headers["Content-Security-Policy"]
            nonce = re.search(r"script-src 'nonce-(\w+)'", policy)[1]
            assert "default-src 'none'" in policy and f'<script nonce="{nonce}">' in await page.text()
            answer = await client.get("/secret/answers/0/step/2")
            assert (await answer.json())[0]["title"] == "Step 2"
            assert (await client.get("/secret/answers/0/step/99")).status == 404
            text = urllib.parse.quote("</script><script>d", safe="")
            found = await (await client.get(f"/secret/answers/0/search/2/?{text}")).json()
            assert [(row["ticket"], row["number"]) for row in found] == [(20, 1), (21, 1)]
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
