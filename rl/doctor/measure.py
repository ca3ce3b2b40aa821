"""The learner and one engine in one process, as train_sync.py has them: publish, log-probs, an update, sleep, speed.

    python -m rl.doctor.measure --engine vllm --model DIRECTORY --findings FILE

Each finding is written as a line of JSON as soon as it is known, so that a check that crashes leaves the earlier findings.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

import train_sync
from rl import flags
from rl.algorithm.kl_control import KLControl
from rl.doctor.findings import OK, SLOW, WRONG, Finding
from rl.generation.choose_engine import make_engine
from rl.generation.engine import Engine, Output, Request, SamplingParams
from rl.learning.batch import Batch, micro_batches
from rl.learning.flops import train_flops_per_token
from rl.learning.learner import Learner
from rl.model.attention import linear_layers
from rl.model.pretrained import resolve
from rl.model.vision_forward import row_inputs
from rl.ranks import device, process
from rl.ranks.dist import Ranks
from rl.ranks.timers import Timers
from rl.samples.group import Group, Response
from rl.weights.local import LocalWeights

# Largest mean and largest 99% quantile of |log-prob of the engine - log-prob of the learner|. Raw log-probs, without a
# temperature of 0.6, are off by 0.1 or more.
LIMITS = {torch.float32: (2e-3, 2e-2), torch.bfloat16: (5e-2, 0.5)}
LOW_MFU = 0.1


@dataclass
class Args:
    engine: Literal["embedded", "vllm"]
    """The engine to check."""
    model: str
    """Directory or hub name of a model."""
    findings: Path
    """File to append findings to."""


@dataclass(frozen=True)
class Sizes:
    """The amount of work: enough to time an accelerator, little on a CPU."""

    requests: int
    prompt: int
    response: int
    sequences: int  # in an update


class NoImages:
    """The image inputs of a batch without images, for a model that takes images (rl/learning/batch_images.py)."""

    @staticmethod
    def inputs(lengths: Sequence[int], after: Sequence[int], groups: Sequence[int], own: torch.device) -> dict:
        inputs = row_inputs(lengths, after, [None] * len(groups))
        return {"position_ids": inputs["position_ids"].to(own), "images": inputs["images"]}


class Checks:
    """The checks, in order. Each one builds on the state that earlier checks have left."""

    def __init__(self, args: Args, ranks: Ranks):
        self.sizes = Sizes(128, 128, 128, 64) if device.has_accelerator() else Sizes(32, 24, 24, 16)
        self.path = args.findings
        self.dtype = torch.bfloat16 if device.has_accelerator() else torch.float32
        name = str(self.dtype).removeprefix("torch.")
        length = ["--max-prompt-length", str(self.sizes.prompt), "--max-response-length", str(self.sizes.response)]
        given = ["--model", args.model, "--engine", args.engine, "--dtype", name, *length]
        given += ["--max-num-seqs", str(self.sizes.requests), "--train-batch-size", str(self.sizes.sequences)]
        given += ["--rollout-n", "1", "--lr", "1e-4", "--lr-warmup-steps", "0", "--max-tokens-per-micro-batch", "4096"]
        self.args = flags.read(train_sync.Args, args=given)
        self.engine_name, self.ranks = args.engine, ranks
        self.device = ranks.device
        self.rng = np.random.default_rng(0)

    def report(self, check: str, status: str, text: str, remedy: str = "", **facts) -> None:
        """Append a finding to the file."""
        with open(self.path, "a") as file:
            file.write(json.dumps(dataclasses.asdict(Finding(check, status, text, remedy, facts))) + "\n")

    def run(self, path: str) -> None:
        """Run all checks. path: the model's directory."""
        self._start(path)
        self._publish("publish", version=0)
        for temperature in (1.0, 0.6):
            self._log_probs(f"log-probs, temperature {temperature}", temperature)
        self._update()
        self._sleep()
        self._publish("publish after an update", version=1)
        self._log_probs("log-probs after an update", 1.0)
        self._generate()
        self._memory()

    def _start(self, path: str) -> None:
        started = time.perf_counter()
        max_length = self.sizes.prompt + self.sizes.response
        self.engine: Engine = make_engine(path, self.args, max_length, self.args.dtype, self.device, False)
        up = time.perf_counter()
        self.learner = Learner(path, self.args, self.ranks, total_steps=10)
        self.weights = LocalWeights(self.learner, self.engine, self.dtype)
        self.vocabulary = self.learner.config.get_text_config().vocab_size
        seconds = {"engine": up - started, "learner": time.perf_counter() - up}
        self.report("start", OK, f"engine {seconds['engine']:.1f} s, learner {seconds['learner']:.1f} s", **seconds)
        self._kernel()

    def _kernel(self) -> None:
        """Report the attention kernel. The learner has checked its values and gradients when it started."""
        text = self.learner.config.get_text_config()
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        query = torch.zeros(8, text.num_attention_heads, size, dtype=self.dtype, device=self.device)
        if kernel := device.packed_attention(query, 1):
            text = f"{kernel}, {self.dtype}: values and gradients are those of a plain softmax"
            self.report("kernel", OK, text, kernel=kernel)
        elif device.is_accelerator(self.device):
            largest = device.PACKED_ATTENTION[self.device.type][-1]
            remedy = f"heads of at most {largest} numbers, divisible by 8, have a kernel; this model trains without"
            self.report("kernel", SLOW, f"no kernel for packed rows with heads of {size} numbers in {self.dtype}", remedy)
        else:
            self.report("kernel", OK, "a CPU attends through torch's own attention")
        if linear_layers(text):
            self._delta_rule(text)

    def _delta_rule(self, config) -> None:
        """Report the kernels of a hybrid model's gated delta nets, which the learner has compared with plain torch when it
        started."""
        from rl.model.hybrid.kernels import PACKAGE, unused

        if why := unused(config, self.dtype, self.device):
            self.report(
                "delta rule", SLOW, f"plain torch, since flash-linear-attention is not used: {why}", f"install {PACKAGE}"
            )
        elif device.is_accelerator(self.device):
            self.report(
                "delta rule", OK, f"flash-linear-attention, {self.dtype}: values and gradients are those of plain torch"
            )
        else:
            self.report("delta rule", OK, "a CPU computes gated delta nets in plain torch")

    def _publish(self, check: str, version: int) -> None:
        seconds, _ = _timed(lambda: self.weights.publish(version))
        differ, unread, size = [], 0, 0
        for name, tensor in self.learner.weights(self.dtype, frozen=True):
            size += tensor.nbytes
            live = self.engine.read_back(name)
            if live is None:
                unread += 1
            elif not torch.equal(live.cpu() + 0.0, tensor.cpu() + 0.0):  # -0.0 may be read as 0.0
                differ.append(name)
        count = len(self.learner.parameters)
        facts = {"seconds": seconds, "gb": size / 1e9, "weights": count, "unread": unread}
        if differ:
            text = f"{len(differ)} of {count} weights differ in the engine: {', '.join(differ[:3])}"
            self.report(check, WRONG, text, "attach doctor.json to an issue", **facts)
            return
        left = f", {unread} cannot be read back" if unread else ""
        self.report(check, OK, f"{count - unread} of {count} weights equal bit for bit{left}; {seconds:.2f} s", **facts)

    def _log_probs(self, check: str, temperature: float) -> None:
        """Compare the engine's log-probs of its samples with the learner's forward pass over the same tokens."""
        prompts = [self._tokens(self.sizes.prompt - i % 8) for i in range(self.sizes.requests)]
        outputs = self._sample(prompts, temperature)
        responses = [_response(output) for output in outputs]
        batch = self._batch_of([Group(i, prompts[i], "doctor", [response]) for i, response in enumerate(responses)])
        micros = micro_batches(batch, torch.arange(len(responses)), self.learner.micro_batch_tokens, self.ranks)
        self.learner.temperature = temperature
        own = self.learner.log_probs_of("policy", batch, [micros])
        self.learner.temperature = 1.0
        off = (own - batch.rollout_log_prob).abs()
        mean, most = float(off.mean()), float(off.quantile(0.99))
        text = f"{len(off)} tokens differ from the learner's by {mean:.2g} on average, 99% by at most {most:.2g}"
        facts = {"mean": mean, "quantile_99": most}
        allowed, allowed_most = LIMITS[self.dtype]
        if mean <= allowed and most <= allowed_most:
            self.report(check, OK, text, **facts)
        else:
            remedy = "try --enforce-eager, then the other engine; attach doctor.json to an issue"
            self.report(check, WRONG, f"{text}; {allowed:g} and {allowed_most:g} are allowed", remedy, **facts)

    def _update(self) -> None:
        """Run training steps, and time them from the second one on."""
        if getattr(self.engine, "sleeps", False):
            self.engine.sleep()
        learn, length = train_sync.learn, self.sizes.prompt + self.sizes.response
        steps = [self._batch() for _ in range(4)]
        timed = [_timed(lambda of=of: learn(self.args, self.learner, KLControl(self.args), of, Timers())) for of in steps]
        seconds, metrics = [of for of, _ in timed], timed[-1][1]
        rate = self.sizes.sequences * length / float(np.median(seconds[1:]))
        facts = {"tokens_per_s": rate, "seconds": seconds, "grad_norm": metrics["actor/grad_norm"]}
        text = f"{rate:,.0f} tokens/s"
        if not np.isfinite(metrics["actor/grad_norm"]) or metrics["actor/grad_norm"] == 0:
            remedy = "attach doctor.json to an issue"
            self.report("update", WRONG, f"the gradient's norm is {metrics['actor/grad_norm']}", remedy, **facts)
            return
        status, remedy = OK, ""
        if peak := device.peak_flops():
            facts["mfu"] = rate * train_flops_per_token(self.learner.config, length) / peak
            text += f", MFU {facts['mfu']:.0%}"
            if facts["mfu"] < LOW_MFU:
                status = SLOW
                remedy = "small models and short rows reach little; benchmarks/scripts/gpu.py measures longer ones"
        self.report("update", status, text, remedy, **facts)

    def _sleep(self) -> None:
        if not getattr(self.engine, "sleeps", False):
            self.report("sleep", OK, "nothing to free: this engine keeps its memory on this device")
            return
        asleep = device.memory_left()
        self.weights.publish(1)  # wakes the engine
        awake = device.memory_left()
        self.engine.sleep()
        again = device.memory_left()
        if not (asleep and awake and again):
            self.report("sleep", SLOW, "torch does not report this device's free memory")
            return
        gb = [left[0] / 2**30 for left in (asleep, awake, again)]
        facts = {"free_asleep_gb": gb[0], "free_awake_gb": gb[1], "free_asleep_again_gb": gb[2]}
        text = f"free memory asleep {gb[0]:.1f} GB, awake {gb[1]:.1f} GB, asleep again {gb[2]:.1f} GB"
        gave = gb[2] > gb[1] + 0.1
        remedy = "" if gave else "--no-free-cache-engine keeps the engine awake; lower --gpu-memory-utilization"
        self.report("sleep", OK if gave else WRONG, text, remedy, **facts)

    def _generate(self) -> None:
        """Measure the tokens per second of a full engine, from the second run on."""
        prompts = [self._tokens(self.sizes.prompt) for _ in range(self.sizes.requests)]
        seconds = [_timed(lambda: self._sample(prompts, 1.0))[0] for _ in range(3)]
        rate = self.sizes.requests * self.sizes.response / float(np.median(seconds[1:]))
        self.report("generation", OK, f"{rate:,.0f} tokens/s", tokens_per_s=rate, seconds=seconds)

    def _memory(self) -> None:
        memory = device.memory_gb()
        text = ", ".join(f"{name.removeprefix('perf/')} {value:.2f}" for name, value in memory.items())
        self.report("memory", OK, text, **memory)

    # -- mechanics

    def _sample(self, prompts: list[np.ndarray], temperature: float) -> list[Output]:
        sampling = SamplingParams(temperature, max_tokens=self.sizes.response, ignore_eos=True)
        for i, ids in enumerate(prompts):
            self.engine.add(Request(i, ids.tolist(), sampling, seed=i))
        outputs = {}
        while self.engine.num_unfinished:
            outputs |= {output.id: output for output in self.engine.step()}
        return [outputs[i] for i in range(len(prompts))]

    def _batch(self) -> Batch:
        response = self.sizes.response
        chance = np.full(response, -np.log(self.vocabulary), np.float32)
        versions = np.zeros(response, np.int32)
        groups = []
        for i in range(self.sizes.sequences):
            row = Response(self._tokens(response), chance, versions, "stop", score=1.0 - 2.0 * (i % 2))  # all have an advantage
            groups.append(Group(i, self._tokens(self.sizes.prompt), "doctor", [row]))
        return self._batch_of(groups)

    def _batch_of(self, groups: list[Group]) -> Batch:
        batch = Batch.of(groups)
        batch.images = NoImages() if self.learner.policy.takes_images else None
        return batch

    def _tokens(self, n: int) -> np.ndarray:
        return self.rng.integers(2, min(self.vocabulary, 1000), n).astype(np.int32)


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return (the seconds that the call takes on the device, its result)."""
    device.synchronize()
    started = time.perf_counter()
    result = act()
    device.synchronize()
    return time.perf_counter() - started, result


def _response(output: Output) -> Response:
    token_ids, log_probs = np.array(output.token_ids, np.int32), np.array(output.log_probs, np.float32)
    return Response(token_ids, log_probs, np.array(output.versions, np.int32), output.finish_reason, score=0.0)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    process.run(lambda ranks: Checks(args, ranks).run(resolve(args.model)))
