"""--push-to: what is pushed, and runs against a server on this machine that speaks as the Hugging Face hub does."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import yaml
from helpers import run_script

import train_sft
from rl import parts
from rl.checkpoint import push
from rl.errors import UserError

ARGS = parts.make(train_sft.Args, push_to="me/sums", model="Qwen/Qwen2.5-0.5B", lr=1e-6, seed=7)


@pytest.mark.parametrize("is_local", [False, True])
def test_what_is_pushed_and_the_card(tmp_path, monkeypatch, is_local):
    """A local model is named without its path."""
    model = str(tmp_path) if is_local else ARGS.model
    base = tmp_path.name if is_local else model
    pushed = {}
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda self, **how: pushed.update(how))
    (checkpoint := tmp_path / "run" / "step_000020").mkdir(parents=True)
    args = parts.replace(ARGS, model=model)
    assert push.push(args, "train_async", tmp_path / "run", checkpoint).endswith("/me/sums")
    assert pushed["repo_id"] == "me/sums" and pushed["folder_path"] == checkpoint
    assert pushed["commit_message"] == "Step 20 of run" and "training/*" in pushed["ignore_patterns"]
    _, head, text = (checkpoint / "README.md").read_text().split("---\n")
    assert yaml.safe_load(head).get("base_model") == (base if "/" in base else None)
    assert f"# sums\n\n`{base}` after 20 steps of supervised training with `train_async.py`, lr 1e-06, seed 7." in text


def test_a_push_that_fails_says_where_the_checkpoint_is(tmp_path, monkeypatch):
    def fail(self, *_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    (tmp_path / "step_000003").mkdir()
    with pytest.raises(UserError, match=r"me/sums: no route to host. The run is complete.* hf upload me/sums .*_000003"):
        push.push(ARGS, "train_sync", tmp_path, tmp_path / "step_000003")
    with pytest.raises(UserError, match=r"--push-to me/sums: no route to host. Correct"):
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
    assert "after 2 steps of reinforcement learning with `train_async.py`" in hub.files["README.md"].decode()

    hub.refuse = "/commit/"  # the same command again: there is nothing left to train, and the push fails
    done = run("train_async.py", ranks=2, check=False)
    assert done.returncode == 1 and "The run is complete" in done.stderr and f"hf upload me/sums {checkpoint}" in done.stderr
    assert (checkpoint / "model.safetensors").read_bytes() == weights

    hub.refuse = "/repos/create"
    flags[-1] = tmp_path / "refused"
    done = run("train_sync.py", check=False)
    assert done.returncode == 1 and "error: --push-to me/sums: " in done.stderr
    assert not (tmp_path / "refused").exists(), "nothing was trained"
