"""--push-to: the model card by hand, and runs against a server on this machine that speaks as the Hugging Face hub does."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from helpers import run_script

from rl.checkpoint import push
from rl.errors import UserError
from rl.samples.schedule import SyncSchedule

ARGS = {
    "push_to": "me/sums",
    "model": "Qwen/Qwen2.5-0.5B",
    "adv_estimator": "rloo",
    "loss_mode": "cispo",
    "lr": 1e-6,
    "seed": 7,
}
ARGS |= {"rollout_n": 4, "schedule": SyncSchedule(train_batch_size=1024), "adapted": False}


def write(run, validations, rows):
    for name, lines in (("validations.jsonl", validations), ("metrics.jsonl", rows)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_card_has_the_runs_numbers(tmp_path):
    rows = [{"step": 0, "critic/score/mean": None}]
    rows += [
        {"step": k, "critic/score/mean": k / 20, "response_length/mean": None, "actor/entropy": 1 / k} for k in range(1, 21)
    ]
    of = lambda step, a, b: {"step": step, "val-core/gsm8k/acc/mean@1": a, "val-core/math/acc/mean@1": b}  # noqa: E731
    write(tmp_path, [of(0, 0.1, 0.2), of(5, 0.5, 0.9), of(10, 0.6, 0.7), of(20, 0.6, None)], rows)
    card = push.model_card(SimpleNamespace(**ARGS), "train_async", tmp_path)
    assert card.startswith(
        "---\nlibrary_name: transformers\nbase_model: Qwen/Qwen2.5-0.5B\ntags:\n- reinforcement-learning\n---\n"
    )
    assert (
        "# sums\n\n`Qwen/Qwen2.5-0.5B` after reinforcement learning with `train_async.py`: 20 steps of 1,024 prompts, 4" in card
    )
    assert "`--adv-estimator rloo`, `--loss-mode cispo`, learning rate 1e-06,\nseed 7" in card
    assert "| step | gsm8k/acc/mean@1 | math/acc/mean@1 |\n| --- | --- | --- |\n| 0 (first) | 0.1 | 0.2 |" in card
    assert "| 0.2 |\n| 5 (best) | 0.5 | 0.9 |" in card
    assert "| 20 (last) | 0.6 | - |" in card and "| 10 (" not in card
    assert "|  | first 2 | last 2 steps |\n| --- | --- | --- |\n| reward | 0.075 | 0.975 |\n" in card
    assert "| tokens of a response | - | - |\n| entropy | 0.75 | 0.05132 |" in card


def test_a_local_model_is_named_without_its_path_and_an_empty_run_has_a_card(tmp_path):
    write(tmp_path, [], [])
    card = push.model_card(SimpleNamespace(**ARGS | {"model": str(tmp_path)}), "train_sync", tmp_path)
    assert "base_model" not in card and str(tmp_path) not in card and f"`{tmp_path.name}` after" in card
    assert "##" not in card and "0 steps" in card


def test_the_card_of_a_supervised_run_with_adapters(tmp_path):
    write(tmp_path, [], [{"step": k, "actor/nll": 1 / k, "val/nll": 0.5} for k in (1, 2)])
    flags = {name: value for name, value in ARGS.items() if name not in ("adv_estimator", "loss_mode", "rollout_n")}
    card = push.model_card(SimpleNamespace(**flags | {"adapted": True}), "train_sft", tmp_path)
    assert "- supervised-training\n" in card and "reinforcement" not in card and "`adapter/` has them alone" in card
    assert "after supervised training with `train_sft.py`: 2 steps of 1,024 conversations, learning rate 1e-06,\nseed 7" in card
    assert "| -log p of an answer's token | 1 | 0.5 |\n| the same, of the validation | 0.5 | 0.5 |" in card


def test_a_push_that_fails_says_where_the_checkpoint_is(tmp_path, monkeypatch):
    def fail(self, *_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    write(tmp_path, [], [])
    (tmp_path / "step_000003").mkdir()
    with pytest.raises(
        UserError, match=r"me/sums: ConnectionError: no route to host. The run is complete.* hf upload me/sums .*_000003"
    ):
        push.push(SimpleNamespace(**ARGS), "train_sync", tmp_path, tmp_path / "step_000003")
    with pytest.raises(UserError, match=r"--push-to me/sums: ConnectionError: no route to host. Correct"):
        push.open_repository("me/sums")


class Hub(ThreadingHTTPServer):
    """What create_repo and create_commit ask of the hub. As there, a repository is made once, weights are sent apart by their
    sha256 (here by LFS alone: Xet needs a server of its own), and a commit takes only weights that have arrived. refuse: a
    path's part that is answered with 403."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.refuse, self.asked, self.files, self.summary = "", [], {}, ""
        self.repos, self.large = set(), {}  # large: content by sha256
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def create(self, body: bytes) -> tuple[int, dict]:
        made = json.loads(body)
        repo = f"{made.get('organization') or 'me'}/{made['name']}"
        code = 409 if repo in self.repos else 200
        self.repos.add(repo)
        return code, {"url": f"https://huggingface.co/{repo}"} | ({"error": "it is there"} if code == 409 else {})

    def preupload(self, body: bytes) -> tuple[int, dict]:
        mode = lambda file: "lfs" if file["path"].endswith(".safetensors") or file["size"] > 10 << 20 else "regular"  # noqa: E731
        files = [{"path": f["path"], "uploadMode": mode(f), "shouldIgnore": False} for f in json.loads(body)["files"]]
        return 200, {"files": files}

    def batch(self, body: bytes) -> tuple[int, dict]:
        objects = [{"oid": each["oid"], "size": each["size"]} for each in json.loads(body)["objects"]]
        for each in objects:
            if each["oid"] not in self.large:
                each["actions"] = {"upload": {"href": f"{self.url}/large/{each['oid']}"}}
        return 200, {"transfer": "basic", "objects": objects}

    def commit(self, body: bytes) -> tuple[int, dict]:
        files, summary = {}, ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file" and not value["path"].endswith(".safetensors"):
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile" and value["oid"] in self.large:
                files[value["path"]] = self.large[value["oid"]]
            else:
                return 400, {"error": f"{value['path']} is not here"}
        self.files, self.summary = self.files | files, summary
        return 200, {"commitUrl": "https://huggingface.co/me/sums/commit/1", "commitOid": "1"}

    def validate(self, body: bytes) -> tuple[int, dict]:
        head = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        wrong = [key for key in head if key not in ("library_name", "base_model", "tags", "license", "pipeline_tag")]
        return (400, {"errors": [{"message": f"not known: {wrong}"}]}) if wrong else (200, {"warnings": []})


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        hub.asked.append((self.path, body[:200]))
        if self.headers["Authorization"] != "Bearer hf_test":
            return self.answer(401, {"error": "who are you?"})
        if hub.refuse and hub.refuse in self.path:
            return self.answer(403, {"error": "you may not"})
        repo = next((repo for repo in hub.repos if f"/{repo}" in self.path), "of nobody")
        answers = {
            "/api/repos/create": hub.create,
            "/api/validate-yaml": hub.validate,
            f"/api/models/{repo}/preupload/main": hub.preupload,
            f"/{repo}.git/info/lfs/objects/batch": hub.batch,
            f"/api/models/{repo}/commit/main": hub.commit,
        }
        if self.path not in answers:
            return self.answer(404, {"error": "not there"})
        self.answer(*answers[self.path](body))

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        digest = hashlib.sha256(content).hexdigest()
        if self.path != f"/large/{digest}":
            return self.answer(400, {"error": "another content"})
        self.server.large[digest] = content
        self.answer(200, {})

    def do_GET(self):
        self.answer(404, {"error": "not there"})

    def answer(self, code: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_run_pushes_its_last_checkpoint_and_a_push_that_fails_loses_nothing(demo_model, tmp_path):
    hub = Hub()
    flags = ["--total-training-steps", 2, "--test-freq", 2, "--val-max-samples", 20, "--push-to", "me/sums"]
    flags += ["--experiment-name", "sums", "--output-dir", tmp_path]
    # fresh: a fork has read the hub's address already
    run = lambda script, **how: run_script(script, *flags, env=hub.environment, fresh=True, **how)  # noqa: E731
    done = run("train_async.py", ranks=2)
    assert f"hub         {hub.environment['HF_ENDPOINT']}/me/sums" in done.stdout
    made = json.loads(hub.asked[0][1])
    assert hub.asked[0][0] == "/api/repos/create" and "private" in (
        made.get("visibility"),
        *(key for key in made if made[key] is True),
    )
    checkpoint = tmp_path / "sums" / "step_000002"
    weights = (checkpoint / "model.safetensors").read_bytes()
    assert hub.files["model.safetensors"] == weights and "config.json" in hub.files and "tokenizer_config.json" in hub.files
    assert not any(name.startswith(("training", "manifest")) for name in hub.files) and hub.summary == "Step 2 of sums"
    last = json.loads((tmp_path / "sums" / "validations.jsonl").read_text().splitlines()[-1])
    assert f"| 2 (last) | {last['val-core/demo/acc/mean@1']:.4g} |" in hub.files["README.md"].decode() or "(best)" in str(
        hub.files
    )

    hub.refuse = "/commit/"  # the same command again: there is nothing left to train, and the push fails
    done = run("train_async.py", ranks=2, check=False)
    assert done.returncode == 1 and "The run is complete" in done.stderr and f"hf upload me/sums {checkpoint}" in done.stderr
    assert (checkpoint / "model.safetensors").read_bytes() == weights

    hub.refuse = "/repos/create"
    flags[-1] = tmp_path / "refused"
    done = run("train_sync.py", check=False)
    assert done.returncode == 1 and "error: --push-to me/sums: " in done.stderr
    assert not (tmp_path / "refused").exists(), "nothing was trained"
