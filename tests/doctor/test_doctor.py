"""doctor.py: on a healthy machine every line is ok. Each planted fault makes a WRONG line that says what to do."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import CHILDREN_FORK, ROOT, left_over, run_script

from rl.generation.embedded import TransformersEngine
from rl.ranks import host
from tools.doctor import packages
from tools.doctor.processes import OK, SKIPPED, SLOW, WRONG


def measured(tmp_path, ranks, model: str, engine: str = "embedded") -> dict[str, dict]:
    """Return the results of tools/doctor/measure.py by check."""
    from tools.doctor.measure import Checks

    file = tmp_path / "findings"
    Checks(engine, model, file, ranks).run()
    return {finding["check"]: finding for finding in map(json.loads, file.read_text().splitlines())}


def wrong(findings: dict[str, dict]) -> set[str]:
    return {check for check, finding in findings.items() if finding["status"] == WRONG}


@pytest.mark.slow
def test_a_healthy_engine_is_ok(tmp_path, ranks, demo_model):
    findings = measured(tmp_path, ranks, demo_model)
    assert {finding["status"] for finding in findings.values()} == {OK}
    assert {"publish", "log-probs, temperature 0.6", "update", "publish after an update", "generation"} <= findings.keys()
    assert findings["update"]["facts"]["tokens_per_s"] > 0


@pytest.mark.slow
def test_a_model_with_images_is_examined_too(tmp_path, ranks, demo_vl_model):
    assert not wrong(measured(tmp_path, ranks, demo_vl_model))


@pytest.mark.slow
def test_log_probs_that_ignore_the_temperature_are_wrong(tmp_path, ranks, demo_model, monkeypatch):
    """vllm-ascend's sampler ignores it by default."""
    from transformers import AutoModelForCausalLM

    model, prompts, temperatures = AutoModelForCausalLM.from_pretrained(demo_model), {}, {}
    step, add = TransformersEngine.step, TransformersEngine.add

    def remember(self, request):
        prompts[request.id] = request.prompt_ids
        temperatures[request.id] = request.sampling.temperature
        add(self, request)

    @torch.no_grad()
    def raw(self):
        outputs = step(self)
        for output in outputs:
            if temperatures[output.id] != 1.0:
                prompt, sampled = prompts[output.id], torch.tensor(output.token_ids)
                logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
                output.log_probs[:] = logits.log_softmax(-1).gather(1, sampled[:, None]).squeeze(1).tolist()
        return outputs

    monkeypatch.setattr(TransformersEngine, "add", remember)
    monkeypatch.setattr(TransformersEngine, "step", raw)
    assert wrong(measured(tmp_path, ranks, demo_model)) == {"log-probs, temperature 0.6"}


@pytest.mark.slow
def test_a_weight_that_does_not_arrive_is_wrong(tmp_path, ranks, demo_model, monkeypatch):
    update = TransformersEngine.update

    def forgetful(self, weights, version, recompute_kv=False):
        before = self.read_back("model.layers.1.mlp.up_proj.weight").clone()
        update(self, weights, version, recompute_kv)
        if version == 1:
            self.read_back("model.layers.1.mlp.up_proj.weight").copy_(before)

    monkeypatch.setattr(TransformersEngine, "update", forgetful)
    findings = measured(tmp_path, ranks, demo_model)
    assert "publish after an update" in wrong(findings)
    assert "model.layers.1.mlp.up_proj.weight" in findings["publish after an update"]["text"]


# ------------------------------------------------------------------------------------------- packages and drivers


def test_another_set_is_named_package_by_package():
    """This environment has neither torch-npu nor vllm-ascend."""
    finding = packages.check_packages("npu")
    assert finding.status == WRONG
    assert "torch-npu is missing" in finding.text and "vllm-ascend is missing" in finding.text
    assert "requirements-npu.txt" in finding.remedy


@pytest.mark.parametrize(
    ("missing", "status"),
    [({"vllm"}, SLOW), ({"vllm", "torch"}, WRONG), ({"tyro"}, WRONG), (set(), OK)],
)
def test_without_vllm_a_gpu_still_works(missing, status, monkeypatch, tmp_path):
    """The embedded engine generates."""
    there = ["transformers", "tyro", "torch", "vllm"]
    (tmp_path / "requirements-cuda.txt").write_text("\n".join(there))
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    monkeypatch.setattr(packages, "_version", lambda name: None if name in missing else "1.0")
    monkeypatch.setitem(packages.REQUIREMENTS, "cuda", "requirements-cuda.txt")
    finding = packages.check_packages("cuda")
    assert finding.status == status
    assert all(name in finding.text for name in (missing if len(missing) == 1 else ["torch"] if missing else []))


@pytest.mark.parametrize("name", ["nvidia0", "nvidia3", "nvidia12", "davinci0", "davinci5"])
def test_a_device_that_torch_does_not_find_is_wrong(name, tmp_path, monkeypatch):
    """A driver older than torch's build leaves the device's file and no device: a run would train on the CPU. A container shows
    the machine's devices under their own numbers, so that there may be no number 0."""
    (tmp_path / name).touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(host, "DEVICE_FILES", tmp_path)
    facts = {"kind": "cpu", "RL_DEVICE": None, "torch": "2.13.0", "cuda": "13.0"}
    (finding,) = packages.check_driver(facts)
    assert finding.status == WRONG and str(tmp_path / name) in finding.text and finding.remedy
    (finding,) = packages.check_driver(facts | {"RL_DEVICE": "cpu"})
    assert finding.status == SKIPPED, "asked for"


def test_what_ascend_wants_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("HCCL_CONNECT_TIMEOUT", raising=False)
    monkeypatch.setattr(packages, "OLDEST_GLIBC", (99, 0))
    facts = {"kind": "npu", "device": "Ascend910B3", "devices": 2, "memory_gb": 61.0, "cann": "8.2.RC1"}
    found = {finding.check: finding for finding in packages.check_driver(facts)}
    assert {check for check, finding in found.items() if finding.status == WRONG} == {"CANN", "glibc", "allocator"}
    assert "export HCCL_CONNECT_TIMEOUT" in found["HCCL"].remedy
    found = {finding.check: finding for finding in packages.check_driver(facts | {"cann": "9.1.0"})}
    assert found["CANN"].status == OK


# ------------------------------------------------------------------------------------------------------- the whole


@pytest.mark.slow
def test_without_packages_it_says_what_to_install(tmp_path):
    """In an environment with nothing but Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=120)
    command = [tmp_path / "bare" / "bin" / "python", "doctor.py", "--out", tmp_path / "doctor.json"]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "requirements.txt" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("flags, what", [(["--nproc", "1"], "--nproc"), (["--out", "/nowhere/doctor.json"], "/nowhere")])
def test_flags_that_cannot_work_are_one_message(flags, what):
    done = subprocess.run([sys.executable, "doctor.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode and what in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_doctor_finds_this_machine_well(tmp_path, demo_model):
    """With both engines and all scripts. No process is left behind."""
    mark, file = "d-whole-", tmp_path / "doctor.json"
    run_script("doctor.py", "--out", file, env={"MARK": mark} | CHILDREN_FORK, timeout=800)
    record = json.loads(file.read_text())
    status = {check["check"]: check["status"] for check in record["checks"]}
    assert WRONG not in status.values()
    for engine in ("embedded", "vllm"):
        assert status[f"{engine}, log-probs after an update"] == OK
    for name in ("train_sync.py, 2 ranks", "train_one_step_off.py, 2 ranks", "train_async.py, 2 ranks, vllm"):
        assert status[name] == OK
    assert status["train_async.py, 2 ranks, publish"] == OK
    assert record["machine"]["kind"] == "cpu" and record["seconds"] > 0
    assert not left_over(mark)
    fields = {"check", "status", "text", "remedy", "facts"}
    assert all(check.keys() == fields for check in record["checks"])
