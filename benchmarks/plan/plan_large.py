"""The memory of Qwen3-30B-A3B's recipes on 8, 16 and 32 devices, counted by dry runs (tools/plan/dry_run.py).

    python benchmarks/plan/plan_large.py    # half an hour on one core, 2 GB; writes benchmarks/results/plan_large.{json,md}

The flags are those of examples/*30b_a3b*.sh, read from the scripts themselves; nodes have 8 devices each. Where a recipe does
not fit as it stands, changes of its flags are counted in turn, until one fits. Nothing of the model is read but its shapes.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import RESULTS, ROOT, table, write
from transformers import Qwen3MoeConfig

import train_async
import train_sync
from rl import flags
from rl.errors import UserError
from tools.plan.devices import Machine, device
from tools.plan.memory_plan import GB, MemoryPlan, learners_of, node_memory

QWEN3_30B_A3B = dict(
    vocab_size=151_936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
RECIPES = {"DAPO, async": "dapo_qwen3_30b_a3b_async.sh", "GSPO, sync": "gspo_qwen3_30b_a3b.sh"}
SCRIPTS = {"train_sync.py": train_sync, "train_async.py": train_async}
OFFLOAD = ["--no-param-offload", "--optimizer-offload"]  # with --dtype bfloat16, which both recipes have
CHANGES = [  # of a recipe's flags, those first that cost least
    [],
    OFFLOAD,
    [*OFFLOAD, "--optim", "adamw_8bit"],
    ["--param-offload"],
]
CAUSES = ("weights", "gradients", "optimizer", "gathered layers", "activations", "logits")
HEAD = ["devices", "recipe", "flags changed", *CAUSES, "rest", "all", "between steps", "host, first node", ""]
SAYS = (
    "GB on the fullest learner at its peak, by cause; all of it between two steps; host memory of the first node's "
    "learners. A tenth of the device is left free (tools/plan/memory_plan.py). Responses are as long as the flags allow."
)
PER_NODE = 8
FAKE_TORCHRUN = '#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n'


@dataclass
class Args:
    devices: tuple[int, ...] = (8, 16, 32)
    """Devices of the job."""
    kinds: tuple[str, ...] = ("H100-80GB", "910B-64GB")
    """Kinds of devices, of tools/plan/devices.py."""
    recipes: tuple[str, ...] = tuple(RECIPES)
    """Recipes to count."""
    layers: int = QWEN3_30B_A3B["num_hidden_layers"]
    """Layers of the model, for a quick look."""
    out: str = str(RESULTS)
    """Directory of the results."""


def recipe(name: str, directory: Path) -> tuple[str, list[str]]:
    """(the script, its flags) that a recipe hands to torchrun on nodes of PER_NODE devices."""
    fake = directory / "torchrun"
    fake.write_text(FAKE_TORCHRUN)
    fake.chmod(0o755)
    env = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "examples" / RECIPES[name]], env=env, capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    at = next(i for i, word in enumerate(words) if word in SCRIPTS)
    return words[at], words[at + 1 :]


def cells(plan: MemoryPlan) -> list[str]:
    at_peak, kept = plan.learner.device, plan.learner.kept
    parts = [at_peak[cause] for cause in CAUSES]
    sizes = [*parts, at_peak.total() - sum(parts), at_peak.total(), kept.total(), node_memory(plan)]
    lacks = ", ".join(f"{what} {by / GB:.0f}" for what, by in plan.lacking().items())
    return [*(f"{size / GB:.1f}" for size in sizes), f"lacks: {lacks}" if lacks else "fits"]


def plans(args: Args, directory: Path) -> Iterator[tuple[list[str], MemoryPlan | UserError]]:
    """(devices, recipe, flags changed; the plan, or why there is none) of every recipe as it stands, and with changes until one
    fits."""
    for kind, what, count in itertools.product(args.kinds, args.recipes, args.devices):
        (script, words), seen, machine = recipe(what, directory), [], Machine(count // PER_NODE, PER_NODE)
        words += ["--model", str(directory)]
        plain = flags.read(SCRIPTS[script].Args, args=words)
        learners = learners_of(plain, machine)
        fewer = ["--sequence-parallel", str(learners)] if learners < plain.learner.sequence_parallel else []
        for more in CHANGES:
            own = flags.read(SCRIPTS[script].Args, args=[*words, *fewer, *more])
            if own in seen:
                continue
            seen.append(own)
            found = MemoryPlan(script.removesuffix(".py"), own, machine, device(kind))
            try:
                fits = not found.lacking()
            except UserError as error:
                found, fits = error, False
            changed = " ".join([*fewer, *more])
            yield [f"{count} x {kind}", what, f"`{changed}`" if changed else "as it stands"], found
            if fits:
                break


def main(args: Args) -> None:
    rows, data = [], []
    with tempfile.TemporaryDirectory() as name:
        Qwen3MoeConfig(**QWEN3_30B_A3B | {"num_hidden_layers": args.layers}).save_pretrained(name)
        for case, found in plans(args, Path(name)):
            if isinstance(found, UserError):
                rows.append([*case, *[""] * (len(HEAD) - 4), str(found).partition(".")[0]])
            else:
                rows.append([*case, *cells(found)])
                memory = {side: getattr(found.learner, side) for side in ("device", "kept", "host", "host_kept")}
                data.append({"case": case, **memory})
            write("plan_large", data, f"{SAYS}\n\n{table(HEAD, rows)}", Path(args.out))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
