"""Helpers that the tests share: tiny random models, records, and ways to run a script as a user would.

torch and transformers are imported where they are used: xdist's controller loads this file too, and runs no test.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from examples.demo import VERSIONS, directory, is_made
from user_processes.server import python_path

ROOT = Path(__file__).resolve().parents[2]
GSM8K = Path(os.environ.get("RL_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))  # train.parquet, test.parquet
SMALL = dict(
    vocab_size=32,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    max_position_embeddings=256,
    initializer_range=0.2,  # large enough that log-probs differ from token to token
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)

DELTA = dict(
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    head_dim=16,
    layer_types=["linear_attention", "full_attention"],
)


def config(name: str, **more):
    import transformers

    return getattr(transformers, name)(**SMALL, **more)


CONFIGS = {
    "qwen2-tied": lambda: config("Qwen2Config", tie_word_embeddings=True),
    "qwen2-untied": lambda: config("Qwen2Config", tie_word_embeddings=False),
    "qwen3": lambda: config("Qwen3Config", head_dim=16, tie_word_embeddings=False),
    "qwen3_5": lambda: config("Qwen3_5TextConfig", **DELTA),
    "qwen3_next": lambda: config("Qwen3NextConfig", shared_expert_intermediate_size=32, **MOE, **DELTA),
    "moe": lambda: config("Qwen3MoeConfig", head_dim=16, tie_word_embeddings=False, **MOE),
}


def save_model(kind: str, path: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]()).save_pretrained(path)
    return str(path)


def save_for_demo(kind: type, path: Path, **sizes) -> str:
    """Save a tiny random model of this config class that reads the demo's problems."""
    import torch
    from transformers import AutoModelForCausalLM

    from examples.demo.sums import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = kind(**SMALL | {"vocab_size": len(tokenizer)} | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


# ------------------------------------------------------------------------------------------------------------ records


def make_demonstrations(*answers: int) -> list:
    """Return a random conversation for each number of answers, of different lengths."""
    import numpy as np

    from rl.data.demonstrations import Demonstration

    rng, out = np.random.default_rng(0), []
    for count in answers:
        parts = [(int(rng.integers(1, 7)), trained) for _ in range(count) for trained in (False, True)]
        trained = np.concatenate([np.full(n, word) for n, word in parts])
        out.append(Demonstration(rng.integers(2, 32, len(trained)).astype(np.int32), trained))
    return out


def compare(lp, roll, mask, seq, level="token", bounds=(None, 2.0), rejected=None) -> dict[str, float]:
    """The metrics of rl/algorithm/rollout_metrics.py for tensors [N], without training/rollout_probs_diff_*."""
    from rl.algorithm.metrics import rollout_metrics

    targets = SimpleNamespace(actor_log_prob=lp, rejected=rejected)
    batch = SimpleNamespace(mask=mask, seq=seq, rollout_log_prob=roll, targets=targets, ranks=None)
    found = rollout_metrics(SimpleNamespace(rollout_is=level, weight_bounds=bounds), batch)
    return {name: value for name, value in found.items() if "probs_diff" not in name}


def make_group(ticket, sizes, prompt=4, rng=None, score=None, unscored=(), masked=False):
    """A prompt of this many random tokens with responses of these `sizes`; those numbered in `unscored` could not be scored."""
    import numpy as np

    from rl.samples.group import Group, Response

    rng = rng or np.random.default_rng(ticket)
    responses = [
        Response(
            token_ids=rng.integers(2, 32, n).astype(np.int32),
            log_probs=-rng.random(n).astype(np.float32),
            versions=rng.integers(0, 3, n).astype(np.int32),
            finish_reason="length" if i % 2 else "stop",
            score=None if i in unscored else float(i if score is None else score),
            extra={"acc": float(i)},
            error="timeout: no score after 10 s" if i in unscored else None,
            mask=rng.random(n) < 0.5 if masked and i % 2 else None,
        )
        for i, n in enumerate(sizes)
    ]
    return Group(ticket, rng.integers(2, 32, prompt).astype(np.int32), "demo", responses)


def response_of(output, prompt: int = 0):
    """Return an engine's output as a response, with its routes, if there are any, behind a prompt of this length."""
    import numpy as np

    from rl.samples.group import Response

    routes = None if output.routes is None else output.routes[prompt:]
    arrays = np.array(output.token_ids, np.int32), np.array(output.log_probs, np.float32), np.array(output.versions, np.int32)
    return Response(*arrays, output.finish_reason, routes=routes)


def drain(engine, requests) -> dict:
    """Return the outputs of an engine by id, when it has no work left."""
    for request in requests:
        engine.add(request)
    outputs = []
    while engine.num_unfinished:
        outputs += engine.step()
    return {output.id: output for output in outputs}


def with_routes(group, draw: Callable):
    """Return the group with routes for R3. draw: number of tokens -> their routes [n, layers, experts of a token]."""
    of_prompt = draw(len(group.prompt_ids))
    responses = [replace(response, routes=draw(len(response.token_ids) - 1)) for response in group.responses]
    return replace(group, prompt_routes=of_prompt, responses=responses)


def job_of(steps: int):
    """Return what a run's record reads of a job."""
    return SimpleNamespace(script="script", total_steps=steps, notes={})


def save_once(learner, run: Path, args, saver: type, steps: Sequence[int] = (1,), say=print):
    """Save checkpoints of a learner without a run, to their end; return what saved them."""
    about, prompts = SimpleNamespace(dir=run, say=say), SimpleNamespace(prep=None)
    job = SimpleNamespace(tokenizer=SimpleNamespace(save_pretrained=lambda _: None), prompts=prompts)
    writer = saver(args, job, about, {}, learner, None)
    for step in steps:
        writer.save(step, {})
    writer.wait()
    return writer


# ------------------------------------------------------------------------------------------------ what others compute


def whole(tensor):
    """Return all of a tensor that ranks may share. Collective if they do."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def relative(a, b, least: float = 0.0) -> float:
    """Return the norm of a - b over the norm of b, or over `least`."""
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp_min(least))


def flat_gradient(model):
    """Return all gradients of a model as one vector; zeros where a parameter has none."""
    import torch

    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients]).detach()


def log_distributions(compute, batch, temperature: float = 1.0, fronts=None) -> Iterator:
    """Yield log-probs [n, V] of each of a batch's responses, one sequence at a time. compute: ids [1, T] -> logits; fronts:
    token ids in place of each response's prompt."""
    import torch

    for response, tokens in enumerate(batch.token.split(batch.lengths.tolist())):
        front = batch.prompts[response].tolist() if fronts is None else fronts[response]
        logits = compute(torch.tensor([[*front, *tokens.tolist()]]))[0, len(front) - 1 : -1]
        yield (logits / temperature).log_softmax(-1)


def plain_log_probs(compute, batch, temperature: float = 1.0, fronts=None) -> list:
    """Return the log-probs [n] of each response's tokens, as log_distributions does."""
    import torch

    rows = log_distributions(compute, batch, temperature, fronts)
    tokens = batch.token.split(batch.lengths.tolist())
    return [row[torch.arange(len(of)), of.long()] for row, of in zip(rows, tokens, strict=True)]


def packed_learner(path: str, ranks, **flags) -> tuple:
    """Return a learner (flags: of LearnerArgs) and its log-probs of packed rows with shared prompts of uneven lengths; their
    gradient stays."""
    import torch

    from rl.learning.args import LearnerArgs
    from rl.learning.batch import Batch, MicroBatch
    from rl.learning.learner import Learner

    learner = Learner(path, LearnerArgs(**flags), ranks, 10)
    batch = Batch.of([make_group(t, sizes, prompt=3 + 5 * t) for t, sizes in enumerate([[5, 9, 3], [1], [17, 2]])])
    log_prob = learner.forward(MicroBatch.of(batch, list(range(6)), torch.device("cpu"))).log_prob
    (log_prob * torch.randn(len(log_prob), generator=torch.Generator().manual_seed(0))).sum().backward()
    return learner, log_prob.detach()


def padded_loss(path: str, rows: Sequence):
    """Return transformers' loss of demonstrations, padded and with labels of -100, and its gradient, in double precision."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).double()
    ids, labels, seen = (torch.full((len(rows), 64), value) for value in (0, -100, 0))
    for place, row in enumerate(rows):
        n = len(row.ids)
        ids[place, :n], seen[place, :n] = torch.from_numpy(row.ids).long(), 1
        labels[place, :n] = torch.where(torch.from_numpy(row.trained), ids[place, :n], -100)
    loss = model(input_ids=ids, attention_mask=seen, labels=labels).loss
    loss.backward()
    return float(loss.detach()), flat_gradient(model)


# --------------------------------------------------------------------------------------------------- running scripts


may_start = True  # whether the test that runs now may start runs (conftest.py)


def of_adapter(package: str, program: str = "python") -> Path:
    """Return a program of the virtual environment $RL_ADAPTERS/<package>; skip the test where there is none."""
    import pytest

    if not (file := Path(os.environ.get("RL_ADAPTERS", "/nowhere")) / package / "bin" / program).exists():
        pytest.skip(f"{package} has no virtual environment: make $RL_ADAPTERS/{package}")
    return file


def environment(**more: str) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(f"{ROOT}:{ROOT / 'tests' / 'tools'}"), "HF_HUB_OFFLINE": "1"}
    # torch's store asks DNS for the name of whoever connects, and all ranks wait meanwhile: up to ten seconds by default.
    return os.environ | own | {"RES_OPTIONS": "timeout:1 attempts:1"} | more


def free_port() -> int:
    """Return a port at which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def no_time_limit() -> Iterator[None]:
    """Stop the running test's clock, which is pytest-timeout's timer. No test has to pay for shared work."""
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)


def demo(name: str) -> str:
    """Return the directory of a demo model. Make it first if this machine does not have it yet."""
    where = directory(name)
    if not is_made(where):
        make = f"from examples.demo.sums import model_dir; model_dir({name!r})"
        with no_time_limit():
            subprocess.run([sys.executable, "-c", make], cwd=ROOT, env=environment(), check=True, timeout=900)
    return str(where)


def command(*arguments, ranks: int | None = None, fresh: bool = False, imported: str = "plain") -> list[str]:
    """What runs a script of the repository, under torchrun if `ranks` is given. `fresh` starts Python, and torchrun, as a user
    does; otherwise they are forks of a process that has `imported` what they need, which saves six seconds a rank: "plain",
    "vllm", or "packages", without the project's own code, for scripts that bring another. Makes the demo's models that are
    named, or else every script's default: the script's own time limit is not for that."""
    assert may_start, "this test starts a run: mark it with pytest.mark.runs"
    arguments = list(map(str, arguments))
    for name in VERSIONS.keys() & {*arguments} or {"demo"}:
        demo(name)
    if not fresh:
        return [sys.executable, "-S", str(ROOT / "tests/tools/forked.py"), imported, str(ranks or 0), *arguments]
    alone = [] if "--nnodes" in arguments else ["--standalone"]
    torchrun = ["-m", "torch.distributed.run", *alone, "--nproc-per-node", str(ranks)] if ranks else []
    return [sys.executable, *torchrun, *arguments]


CHILDREN_FORK = {"FORKED_PYTHON": sys.executable}  # environment of a program whose own scripts are to be forks, too


def run_script(*arguments, timeout: float = 240, check: bool = True, env: dict[str, str] | None = None, cwd=ROOT, **how):
    """Runs a script to its end, as `command` says; returns the finished process with its output as text."""
    env = environment(**(env or {}))
    done = subprocess.run(command(*arguments, **how), cwd=cwd, env=env, timeout=timeout, text=True, capture_output=True)
    if check and done.returncode:
        raise AssertionError(
            f"exit code {done.returncode}\n--- stdout\n{done.stdout[-4000:]}\n--- stderr\n{done.stderr[-6000:]}"
        )
    return done


def start(*arguments, env: dict[str, str] | None = None, **how) -> tuple[subprocess.Popen, str]:
    """Starts a script, stderr into stdout; returns the process and the mark by which `left_over` knows all its processes."""
    mark = uuid.uuid4().hex[:8]
    env = environment(MARK=mark, PYTHONUNBUFFERED="1", **(env or {}))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(command(*arguments, **how), cwd=ROOT, env=env, **pipes), mark


def marked(mark: str) -> Iterator[tuple[int, str, str, str]]:
    """Living processes that carry the mark, in their environment or, forks of tests/tools/forks.py, in their name: number,
    name, command line, environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ, line = ((process / name).read_bytes().decode(errors="replace") for name in ("environ", "cmdline"))
            state, name = (process / "stat").read_text().rpartition(")")[2].split()[0], (process / "comm").read_text().strip()
        except OSError:  # gone, or not ours
            continue
        if state != "Z" and (name.startswith(mark) or f"MARK={mark}" in environ.split("\0")):
            yield int(process.name), name, line.replace("\0", " "), environ


def left_over(mark: str) -> list[str]:
    """Return the command lines of living processes with the mark."""
    return [line for _, _, line, _ in marked(mark)]


def eventually(condition: Callable, seconds: float = 60) -> bool:
    """Return whether the condition comes true within this time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(found)


def run_killed(script: str, *flags, run: Path, steps: int, timeout: float = 300, **how) -> None:
    """Runs a script with kill -9 after its first checkpoint, which is in the directory `run`, and the same command again. No
    process is left in between; if all `steps` were done by then, the last one is to be done again."""
    job, mark = start(script, *flags, **how)
    try:
        assert eventually(lambda: (run / "step_000001" / "config.json").exists() or job.poll() is not None, timeout)
        assert job.poll() is None, job.communicate()[0][-6000:]
    finally:
        job.kill()
        job.communicate()
    assert eventually(lambda: not left_over(mark))
    shutil.rmtree(run / f"step_{steps:06d}", ignore_errors=True)
    run_script(script, *flags, timeout=timeout, **how)


def train(script: str, *flags, out: Path, **how) -> tuple[dict[int, dict], Path, subprocess.CompletedProcess]:
    """Runs a training script as run_script does; returns (metrics by step, the run's directory, the finished process)."""
    done = run_script(script, *flags, "--output-dir", out, **how)
    (run,) = out.iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}, run, done


def weights(run: Path, step: int | None = None) -> dict:
    """Return the tensors of a run's export by name: of that step, or of its only one."""
    from safetensors.torch import load_file

    (export,) = run.glob("step_*" if step is None else f"step_{step:06d}")
    return load_file(export / "model.safetensors")


def bits(run: Path, step: int | None = None) -> dict[str, bytes]:
    """Return the same tensors for a comparison bit for bit."""
    return {name: weight.numpy().tobytes() for name, weight in weights(run, step).items()}


def accuracies(metrics: dict[int, dict]) -> dict[int, float]:
    """Return the demo's validation accuracies by validated step."""
    name = "val-core/demo/acc/mean@1"
    return {row.get("training/validated_step", step): row[name] for step, row in metrics.items() if name in row}


def fates(printed: str) -> tuple[int, ...]:
    """Return how many tickets a run says it has started, trained, dropped, and left in flight."""
    (found,) = re.findall(r"([\d,]+) tickets started = (\d+) trained \+ (\d+) dropped \+ (\d+) in flight", printed)
    return tuple(int(number.replace(",", "")) for number in found)


def undocumented(metrics: dict[int, dict]) -> set[str]:
    """Return the names in a run's metrics that docs/metrics.md does not have."""
    return {name for row in metrics.values() for name in row if name not in ("step", "time") and not is_documented(name)}


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Fail the block once this process has used this much CPU time, which does not depend on how busy the machine is."""

    def stop(*_):
        raise AssertionError(f"more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def documented_metrics() -> list[str]:
    """The names in docs/metrics.md, one for each word of `<a, b>`; `<key>`, a name of the user's, stays as it is."""
    names = []
    for row in re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M):
        parts = re.split(r"<([^>]*, [^>]*)>", row)  # every second part is a list of words
        choices = [part.split(", ") if place % 2 else [part] for place, part in enumerate(parts)]
        names += map("".join, itertools.product(*choices))
    return names


def is_documented(name: str) -> bool:
    """Return whether docs/metrics.md has the metric, where <...> stands for anything."""
    patterns = (".+".join(map(re.escape, re.split(r"<[^>]+>", known))) for known in documented_metrics())
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def greedy_answers(directory: str | Path, prompts: Sequence[list[dict]]) -> list[str]:
    """Return the greedy answers of this directory's text model to conversations, computed with transformers only."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory, padding_side="left"),
    )
    texts = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) for prompt in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(output, skip_special_tokens=True)
