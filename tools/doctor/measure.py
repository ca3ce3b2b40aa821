"""The learner and one engine in one process, as train_sync.py has them: publish, log-probs, an update, sleep, speed.

    python -m tools.doctor.measure ENGINE MODEL FILE

Each finding is added to the file as a line of JSON as soon as it is known, so that a check that crashes leaves the earlier
findings.
"""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import train_sync
from rl import flags
from rl.generation.engine import Engine, Request, SamplingParams
from rl.generation.make import make_engine
from rl.learning.batch import Batch, micro_batches
from rl.learning.batch_images import BatchImages
from rl.learning.flops import train_flops_per_token
from rl.learning.learner import Learner
from rl.model.attention import linear_layers
from rl.model.pretrained import resolve
from rl.ranks import device, process
from rl.ranks.dist import Ranks
from rl.ranks.timers import Timers
from rl.samples.group import Group, Response
from rl.setup import LocalWeights
from tools.doctor.processes import ATTACH, OK, SLOW, WRONG, Finding

# Largest mean and largest 99% quantile of |log-prob of the engine - log-prob of the learner|. Raw log-probs, without a
# temperature of 0.6, are off by 0.1 or more.
LIMITS = {torch.float32: (2e-3, 2e-2), torch.bfloat16: (5e-2, 0.5)}
LOW_MFU = 0.1


def memory_left() -> tuple[int, int] | None:
    """Return (bytes of the accelerator that new tensors may take, its total bytes); None if its driver does not know. Unused
    memory of the allocator counts as free."""
    module = device.module()
    try:
        free, total = module.mem_get_info()
    except RuntimeError:
        return None
    return free + module.memory_reserved() - module.memory_allocated(), total


@dataclass(frozen=True)
class Sizes:
    """The amount of work: enough to time an accelerator, little on a CPU."""

    requests: int  # at once, and in an update
    prompt: int  # tokens
    response: int


class Checks:
    """The checks, in order. Each one builds on the state that earlier checks have left."""

    def __init__(self, engine: str, model: str, path: str, ranks: Ranks):
        """engine: embedded or vllm; model: a directory or a hub name; path: a file for the findings."""
        self.sizes = Sizes(128, 128, 128) if device.has_accelerator() else Sizes(32, 24, 24)
        self.model = model
        self.path = path
        self.ranks = ranks
        self.device = ranks.device
        self.dtype = torch.bfloat16 if device.has_accelerator() else torch.float32
        name = str(self.dtype).removeprefix("torch.")
        length = ["--max-prompt-length", str(self.sizes.prompt), "--max-response-length", str(self.sizes.response)]
        given = ["--model", model, "--engine", engine, "--dtype", name, *length]
        given += ["--max-num-seqs", str(self.sizes.requests), "--train-batch-size", str(self.sizes.requests)]
        given += ["--rollout-n", "1", "--lr", "1e-4", "--lr-warmup-steps", "0", "--max-tokens-per-micro-batch", "4096"]
        self.args = flags.read(train_sync.Args, args=given)
        self.rng = np.random.default_rng(0)

    def report(self, check: str, status: str, text: str, remedy: str = "", **facts) -> None:
        """Append a finding to the file."""
        with open(self.path, "a") as file:
            file.write(json.dumps(dataclasses.asdict(Finding(check, status, text, remedy, facts))) + "\n")

    def run(self) -> None:
        self._start()
        self._kernel()
        self._publish("publish", version=0)
        for temperature in (1.0, 0.6):
            self._log_probs(f"log-probs, temperature {temperature}", temperature)
        self._update()
        self._sleep()
        self._publish("publish after an update", version=1)
        self._log_probs("log-probs after an update", 1.0)
        self._generate()

    def _start(self) -> None:
        started = time.perf_counter()
        max_length = self.sizes.prompt + self.sizes.response
        self.engine: Engine = make_engine(self.model, self.args.engine, max_length, self.dtype, self.device, False)
        up = time.perf_counter()
        self.learner = Learner(self.model, self.args.learner, self.ranks, total_steps=10)
        self.weights = LocalWeights(self.learner, self.engine, self.dtype)
        self.vocabulary = self.learner.config.get_text_config().vocab_size
        seconds = {"engine": up - started, "learner": time.perf_counter() - up}
        self.report("start", OK, f"engine {seconds['engine']:.1f} s, learner {seconds['learner']:.1f} s", **seconds)

    def _kernel(self) -> None:
        """Report the attention kernel. The learner has checked its values and gradients when it started."""
        text = self.learner.config.get_text_config()
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        query = torch.zeros(8, text.num_attention_heads, size, dtype=self.dtype, device=self.device)
        if kernel := device.packed_attention(query, 1):
            self.report("kernel", OK, f"{kernel}, {self.dtype}: values and gradients are those of a plain softmax")
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
        from rl.model.hybrid.rule import PACKAGE, unused

        if why := unused(config, self.dtype, self.device):
            self.report("delta rule", SLOW, f"plain torch, not flash-linear-attention: {why}", f"install {PACKAGE}")
        elif device.is_accelerator(self.device):
            text = f"flash-linear-attention, {self.dtype}: values and gradients are those of plain torch"
            self.report("delta rule", OK, text)
        else:
            self.report("delta rule", OK, "a CPU computes gated delta nets in plain torch")

    def _publish(self, check: str, version: int) -> None:
        seconds, _ = _timed(lambda: self.weights.publish(version))
        differ = []
        unread = 0
        size = 0
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
            self.report(check, WRONG, text, ATTACH, **facts)
        else:
            left = f", {unread} cannot be read back" if unread else ""
            self.report(check, OK, f"{count - unread} of {count} weights equal bit for bit{left}; {seconds:.2f} s", **facts)

    def _log_probs(self, check: str, temperature: float) -> None:
        """Compare the engine's log-probs of its samples with the learner's forward pass over the same tokens."""
        batch = self._batch(temperature)
        tokens = self.learner.args.max_tokens_per_micro_batch
        micros = micro_batches(batch, torch.arange(self.sizes.requests), tokens, self.ranks)
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
            text += f"; {allowed:g} and {allowed_most:g} are allowed"
            self.report(check, WRONG, text, f"try --enforce-eager, then the other engine; {ATTACH}", **facts)

    def _update(self) -> None:
        """Run training steps, and time them from the second one on."""
        batch = self._batch(1.0)
        if getattr(self.engine, "sleeps", False):
            self.engine.sleep()
        learn = functools.partial(train_sync.learn, self.args, self.learner, batch, Timers())
        timed = [_timed(learn) for _ in range(4)]
        seconds = [of for of, _ in timed]
        metrics = timed[-1][1]
        length = self.sizes.prompt + self.sizes.response
        rate = self.sizes.requests * length / float(np.median(seconds[1:]))
        norm = metrics["actor/grad_norm"]
        facts = {"tokens_per_s": rate, "seconds": seconds, "grad_norm": norm}
        status = OK
        text = f"{rate:,.0f} tokens/s"
        remedy = ""
        if peak := device.peak_flops():
            facts["mfu"] = rate * train_flops_per_token(self.learner.config, length) / peak
            text += f", MFU {facts['mfu']:.0%}"
            if facts["mfu"] < LOW_MFU:
                status = SLOW
                remedy = "small models and short rows reach little; benchmarks/device/drive.py measures longer ones"
        if not np.isfinite(norm) or norm == 0:
            status = WRONG
            text = f"the gradient's norm is {norm}"
            remedy = ATTACH
        self.report("update", status, text, remedy, **facts)

    def _sleep(self) -> None:
        if not getattr(self.engine, "sleeps", False):
            self.report("sleep", OK, "nothing to free: this engine keeps its memory on this device")
            return
        asleep = memory_left()
        self.weights.publish(1)  # wakes the engine
        awake = memory_left()
        self.engine.sleep()
        again = memory_left()
        if not (asleep and awake and again):
            self.report("sleep", SLOW, "torch does not report this device's free memory")
            return
        gb = [left[0] / 2**30 for left in (asleep, awake, again)]
        facts = {"free_asleep_gb": gb[0], "free_awake_gb": gb[1], "free_asleep_again_gb": gb[2]}
        text = f"free memory asleep {gb[0]:.1f} GB, awake {gb[1]:.1f} GB, asleep again {gb[2]:.1f} GB"
        gave = gb[2] > gb[1] + 0.1
        remedy = "" if gave else "lower --gpu-memory-utilization, or take train_one_step_off.py, whose engine never sleeps"
        self.report("sleep", OK if gave else WRONG, text, remedy, **facts)

    def _generate(self) -> None:
        """Measure the tokens per second of a full engine, from the second run on."""
        seconds = [_timed(lambda: self._batch(1.0))[0] for _ in range(3)]
        rate = self.sizes.requests * self.sizes.response / float(np.median(seconds[1:]))
        self.report("generation", OK, f"{rate:,.0f} tokens/s", tokens_per_s=rate, seconds=seconds)

    def _batch(self, temperature: float) -> Batch:
        """Return a batch of the engine's samples, which all have an advantage."""
        tokens = self.rng.integers(2, min(self.vocabulary, 1000), (self.sizes.requests, self.sizes.prompt), np.int32)
        prompts = [row[i % 2 :] for i, row in enumerate(tokens)]  # of two lengths
        sampling = SamplingParams(temperature, max_tokens=self.sizes.response, ignore_eos=True)
        for i, ids in enumerate(prompts):
            self.engine.add(Request(i, ids.tolist(), sampling, seed=i))
        groups = []
        while self.engine.num_unfinished:
            for output in self.engine.step():
                ids, log_probs = np.array(output.token_ids, np.int32), np.array(output.log_probs, np.float32)
                versions = np.array(output.versions, np.int32)
                score = 1.0 - 2.0 * (output.id % 2)
                response = Response(ids, log_probs, versions, output.finish_reason, score=score)
                groups.append(Group(output.id, prompts[output.id], "doctor", [response]))
        batch = Batch.of(groups)
        batch.images = BatchImages(None, None, groups) if self.learner.policy.takes_images else None
        return batch


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return (the seconds that the call takes on the device, its result)."""
    device.synchronize()
    started = time.perf_counter()
    result = act()
    device.synchronize()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    engine, model, file = sys.argv[1:]
    process.run(lambda ranks: Checks(engine, resolve(model), file, ranks).run())
