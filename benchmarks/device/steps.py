"""The steps of each part of drive.py, with their limits in seconds.

Part 1 is the machine, then whether all is right, then what is timed. Part 2 runs each feature for 3 steps, then measures what
only some models have. Part 3 trains SmolLM2-135M, then measures larger models and vLLM.
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from common import MODES, ROOT, of_fixed_length

from examples.demo import is_made
from rl.ranks import device

MEASURE = str(Path(__file__).resolve().parent / "measure.py")
SMALL, OTHER, LARGE, LARGEST = "Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen2.5-1.5B", "Qwen3-4B"
CHECKPOINTING = "--gradient-checkpointing"
CARRIED = ROOT / ".kit" / "smollm2.sha256"  # made by pack.sh, for a machine without a network
NO_PIECES = "its pieces are not all here: carry .kit2 with one call, .kit3 with a later one"


@dataclass
class Step:
    name: str
    command: list[str]
    limit: float  # seconds
    env: dict[str, str] = field(default_factory=dict)
    run: Path | None = None  # --output-dir of a training script
    missing: str = ""  # the reason why it cannot run here
    process: subprocess.Popen | None = None
    began: float = 0.0


Phase = tuple[int, list[Step]]  # how many at once; the steps


@dataclass(frozen=True)
class Plan:
    work: Path  # models, logs and runs
    out: Path  # results
    toy: bool  # tiny, on any machine

    def part(self, number: int) -> list[Phase]:
        return [self.first, self.second, self.third][number - 1]()

    def first(self) -> list[Phase]:
        tests = ["-m", "pytest", "-m", "device", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/ranks/test_device.py"]
        doctor = ["doctor.py", "--timeout", "150", "--out", str(self.out / "doctor.json")]
        machine = [Step("nvidia-smi", ["sh", "-c", "nvidia-smi || npu-smi info || true"], 40), self.measure("facts", 90)]
        right = [
            Step("doctor", [sys.executable, *doctor], 200, {"OMP_NUM_THREADS": "2"}),
            *(self.demo(script) for script in MODES),
            *self.saved(SMALL, LARGE, OTHER),
            Step("tests of a device", [sys.executable, *tests], 150, {"RL_DEVICE": device.kind()}),
        ]
        flags = ["--model", self.model(SMALL), "--dtype", "bfloat16", "--lr", "1e-6", CHECKPOINTING, "--max-num-seqs", "128"]
        flags += ["--max-response-length", "8" if self.toy else "256"]
        timed = [  # what matters most first, as time may run out
            self.measure("values", 70, SMALL),
            self.measure("learner", 80, SMALL),
            self.measure("engine", 90, SMALL),
            self.measure("profile", 90, SMALL, "--text", str(self.out / "profile.txt")),
            self.measure("publish", 70, OTHER),
            *([] if self.toy else [self.measure("learner", 90, LARGE)]),
            self.training("async, one device", of_fixed_length(MODES["async"]), 120, 3 if self.toy else 12, *flags),
            self.measure("learner", 80, SMALL, CHECKPOINTING),
            self.measure("sdpa", 40),
            self.measure("sdpa", 40, cudnn_first=True),
            *([] if self.toy else [self.measure("learner", 90, LARGE, CHECKPOINTING)]),
        ]
        return [(1, machine), (2 if self.toy else 8, right), (2 if self.toy else 1, timed)]

    def second(self) -> list[Phase]:
        own = ROOT / "models" / "smollm2"  # where make_model.py writes it by default
        model = own if own.exists() else self.work / "models" / "smollm2"
        gguf = self.work / "smollm2.gguf"  # joined by quarter_hour.sh
        missing = NO_PIECES if CARRIED.exists() and not (gguf.exists() or model.exists()) else ""
        make = ["examples/make_model.py", "smollm2", "--out", str(model), *(["--source", str(gguf)] if gguf.exists() else [])]
        data = self.work / "data" / "times"
        tasks = ["examples/small_tasks.py", "times", "--out", str(data)]
        flags = ["--model", str(model), "--train-files", str(data / "train.parquet"), "--val-files", str(data / "test.parquet")]
        flags += ["--reward", "examples/small_tasks.py:score", "--max-prompt-length", "96", "--max-response-length", "32"]
        flags += ["--train-batch-size", "8", "--rollout-n", "8", "--lr", "2e-5", "--lr-scheduler-type", "constant"]
        flags += ["--dtype", "bfloat16", "--test-freq", "25", *(["--val-max-samples", "8"] if self.toy else [])]
        made = [] if model.exists() else [Step("SmolLM2, made", [sys.executable, *make], 120, missing=missing)]
        train = self.training("SmolLM2, trained", MODES["sync"], 400, 1 if self.toy else 100, *flags)
        train.missing = missing
        rest = [*self.saved(SMALL), self.measure("vllm", 400, SMALL)]
        for shape in () if self.toy else (LARGE, LARGEST):
            rest += [*self.saved(shape), self.measure("engine", 200, shape), self.measure("vllm", 400, shape)]
        rest += [] if self.toy else [self.measure("learner", 200, LARGEST, *more) for more in ([], [CHECKPOINTING])]
        return [(2, [*made, Step("SmolLM2, data", [sys.executable, *tasks], 60)]), (1, [train]), (2 if self.toy else 1, rest)]

    def third(self) -> list[Phase]:
        lora = ["--lora-rank", "8", "--lr", "1e-3"]
        replay = ["--model", "demo-moe", "--router-replay", "R3"]
        calculator = ["--model", "demo-calculator", "--env", "demo-calculator", "--max-response-length", "24"]
        kl = ["--kl-loss-coef", "0.001", "--entropy-coeff", "0.001", "--ppo-mini-batch-size", "4"]
        corrected = ["--rollout-is", "token", "--rollout-is-threshold", "2"]
        runs = [  # those that compile kernels first
            self.short("hybrid", "sync", "--model", "demo-hybrid"),
            self.short("compile", "sync", "--compile"),
            self.short("experts, R3", "sync", *replay),
            self.short("images", "sync", "--model", "demo-vl"),
            self.short("adapters", "sync", *lora),
            self.short("critic", "sync", "--adv-estimator", "gae"),
            self.short("teacher, top 4", "sync", "--teacher", "demo", "--teacher-top-k", "4"),
            self.short("calculator", "sync", *calculator),
            self.short("sampling mask", "sync", "--top-k", "8", "--keep-sampling-mask", "--loss-mode", "reinforce"),
            self.short("optimizer offload", "sync", "--optimizer-offload", CHECKPOINTING),
            self.short("param offload", "sync", "--param-offload"),
            self.short("8-bit moments", "sync", "--optim", "adamw_8bit"),
            self.short("fp32", "sync", "--dtype", "float32"),
            self.short("reference, entropy, mini-batches", "sync", *kl),
            self.short("over-sample", "sync", "--over-sample", "0.5"),
            self.short("adapters", "async", *lora),
            self.short("hybrid", "async", "--model", "demo-hybrid"),
            self.short("experts, R3", "async", *replay),
            self.short("corrected", "async", *corrected),
            self.short("images", "one step off", "--model", "demo-vl"),
            self.training("3 steps, supervised", ["train_sft.py"], 130, 3),
        ]
        adapters = [self.measure(what, 70, SMALL, "--lora-rank", "16") for what in ("learner", "publish")]
        parts = [*(self.measure(what, 90) for what in ("packing", "delta", "experts")), *adapters]
        return [(2 if self.toy else 7, [*self.saved(SMALL), *runs]), (2 if self.toy else 1, parts)]

    # -- steps

    def model(self, shape: str) -> str:
        return str(self.work / "models" / ("toy" if self.toy else shape))

    def saved(self, *shapes: str) -> list[Step]:
        """Return steps that make the models of these shapes that are not there."""
        chosen = shapes[:1] if self.toy else shapes
        return [self.measure("save", 90, shape) for shape in chosen if not is_made(Path(self.model(shape)))]

    def measure(self, what: str, limit: float, shape: str = "", *flags: str, cudnn_first: bool = False) -> Step:
        """Return a measurement of measure.py."""
        flags_named = " ".join(flag.removeprefix("--") for flag in flags) if what in ("learner", "publish") else ""
        named = [what, "toy" if shape and self.toy else shape, flags_named, "cuDNN first" if cudnn_first else ""]
        command = [sys.executable, MEASURE, what, *flags, *(["--toy"] if self.toy else [])]
        command += ["--shape", "toy" if self.toy else shape, "--path", self.model(shape)] if shape else []
        missing = "vLLM is not installed" if what == "vllm" and importlib.util.find_spec("vllm") is None else ""
        env = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"} if cudnn_first else {}
        return Step(", ".join(filter(None, named)), command, limit, env, missing=missing)

    def training(self, name: str, script: list[str], limit: float, steps: int, *flags: str) -> Step:
        run = self.work / "runs" / name.replace(" ", "_").replace(",", "")
        command = [sys.executable, *script, "--output-dir", str(run), "--total-training-steps", str(steps), "--save-freq", "-1"]
        command += [] if script == ["train_sft.py"] else ["--engine", "embedded"]
        command += [] if "--test-freq" in flags else ["--test-freq", "0"]
        return Step(name, [*command, *flags], limit, {"OMP_NUM_THREADS": "2"}, run)

    def demo(self, script: str) -> Step:
        steps, every = (2, 2) if self.toy else (60, 20)
        return self.training(f"demo, {script}", MODES[script], 170, steps, "--test-freq", str(every))

    def short(self, feature: str, script: str, *flags: str) -> Step:
        """Return 3 steps of a demo with a feature."""
        return self.training(f"3 steps, {feature}, {script}", MODES[script], 130, 3, *flags)
