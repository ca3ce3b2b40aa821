"""doctor.py: on a healthy machine every line is ok. Each planted fault makes a WRONG line that says what to do."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import CHILDREN_FORK, ROOT, environment, left_over, marked, run_script

from rl.generation.embedded.engine import TransformersEngine
from rl.ranks import host
from tools.doctor import packages, processes, scripts
from tools.doctor.findings import OK, SKIPPED, SLOW, WRONG


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


def test_packages_of_the_tests_are_those_of_requirements_txt():
    finding = packages.check_packages("cpu")
    assert finding.status == OK, finding
    assert finding.facts["torch"].startswith("2.")


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


def test_files_of_a_driver_without_devices_are_no_device(tmp_path, monkeypatch):
    for name in ("nvidiactl", "nvidia-uvm", "davinci_manager"):
        (tmp_path / name).touch()
    monkeypatch.setattr(host, "DEVICE_FILES", tmp_path)
    assert host.kind_by_files() == "cpu"


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


# --------------------------------------------------------------------------------------------------- its processes


@pytest.mark.slow
def test_a_command_that_hangs_is_ended_with_all_that_it_has_started():
    """Also processes in their own sessions, and those that ignore SIGTERM."""
    mark = "doctor-hangs"
    child = f"import os, time; os.setsid(); {mark!r}; time.sleep(1000)"
    code = "import subprocess, sys, time;"
    code += f"[subprocess.Popen([sys.executable, '-c', {child!r}]) for _ in range(2)]; time.sleep(1000)"
    program = (
        "import sys; from tools.doctor import processes; from rl.environments import descendants; descendants.adopt_orphans();"
        f"print(processes.run([sys.executable, '-c', {code!r}], 3.0).code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(MARK=mark), capture_output=True, timeout=60
    )
    assert done.stdout.decode().strip() == "None", done.stderr.decode()
    assert not left_over(mark)


def test_a_command_leaves_other_children_alone():
    """This process has some: those from which the tests fork their runs."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert processes.run([sys.executable, "-c", "pass"], 60.0).code == 0
    assert other.poll() is None
    other.communicate(b"\n", timeout=60)
    assert other.returncode == 0


@pytest.mark.parametrize("users", ["/usr/local/Ascend/python/site-packages:/usr/local/Ascend/opp/tbe", "", None])
def test_checks_keep_the_users_python_path(users, monkeypatch):
    """CANN's set_env.sh puts directories there that torch-npu needs."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if users is not None:
        monkeypatch.setenv("PYTHONPATH", users)
    outcome = processes.run([sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"], 60.0)
    assert outcome.output.strip() == (f"{ROOT}:{users}" if users else str(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_doctor_that_is_stopped_leaves_no_process(number, tmp_path):
    mark = f"doctor-{number.name}"
    command = [sys.executable, "doctor.py", "--out", str(tmp_path / "doctor.json")]
    take = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731  (a shell's background ignores it)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(MARK=mark), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=take
    )
    while not any("tools.doctor" in line for _, _, line, _ in marked(mark)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(60)
    deadline = time.monotonic() + 60
    while (left := left_over(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_the_reason_of_a_failure_is_the_users_line():
    error = "warning: x\nerror: --model nowhere: no model can be read there.\ntorchrun's own summary\n"
    assert processes.Outcome(1, error, 1.0).reason == "--model nowhere: no model can be read there."
    traceback = "Traceback (most recent call last):\n  File x\nRuntimeError: HCCL refuses float64\nE1125 some log\n"
    assert processes.Outcome(1, traceback, 1.0).reason == "RuntimeError: HCCL refuses float64"


@pytest.mark.slow
def test_a_script_that_fails_is_wrong_with_its_own_message():
    (finding,) = scripts.check_script("train_sync.py", "/nowhere/model", 1, "float32", timeout=120)
    assert finding.status == WRONG and "/nowhere/model" in finding.text


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
