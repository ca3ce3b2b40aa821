"""Memory of each learner while it loads a mixture of experts and publishes it, against a whole model in fp32.

    python benchmarks/learning/load.py       # writes benchmarks/results/load.{json,md}; 8 GB of memory, 3 GB of disk

A random Qwen3-MoE of a billion parameters, in bf16 and the hub's names, is made for it and deleted. "load" is the most that a
rank holds while its learner is made, "kept" what it holds then, "publish" the most that the first copy of the weights in bf16
adds: all by the resident set, in bytes a parameter, above what Python and torch hold before.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import RESULTS, ROOT, run, setting, table, torchrun, words, write

sys.path.insert(0, str(ROOT / "tests" / "programs"))

SIZES = {  # hidden size, layers, experts a layer, size of an expert, vocabulary
    "1B": (1024, 12, 32, 768, 32768),
    "toy": (64, 2, 4, 32, 256),
}


@dataclass
class Args:
    size: str = "1B"
    """Which of SIZES."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of learners."""
    out: Path = RESULTS
    """Directory of the results."""


def save_model(size: str, path: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    hidden, layers, experts, intermediate, vocabulary = SIZES[size]
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=intermediate,
        norm_topk_prob=True,
        eos_token_id=1,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(path, max_shard_size="500MB")


def measure(path: str) -> None:
    """On each rank; the first prints a line of JSON."""
    import torch
    from memory import Peak

    from rl.learning.args import LearnerArgs
    from rl.learning.learner import Learner
    from rl.ranks import dist, launch, process
    from rl.split import Split
    from rl.weights.publish import Publisher

    def main(ranks: dist.Ranks) -> None:
        with Peak() as load:
            learner = Learner(path, LearnerArgs(), ranks, total_steps=1)
        sizes = [parameter.numel() for parameter in learner.policy.parameters()]
        nodes = [launch.Node("here", 0, ranks.world_size + 1, 1)]
        bridge, store = object() if ranks.is_main else None, torch.distributed.HashStore()
        split = Split("learner", ranks, ranks.world_size, 1, nodes, 0, store, bridge)
        with Peak() as publish:
            publisher = Publisher(learner, split, torch.bfloat16)
            publisher.take_copy()
        own = {"load": load.added, "kept": load.kept, "publish": publish.added}
        everyone = dist.all_gather_values(own)
        if ranks.is_main:
            print(json.dumps({"parameters": sum(sizes), "largest": max(sizes), "ranks": everyone}), flush=True)

    process.run(main)


def rows(results: dict[int, dict]) -> list[list[str]]:
    out = []
    for ranks, of in results.items():
        share, tensor = 4 / ranks, 4 * of["largest"] / of["parameters"]
        for name, members in (("the first", of["ranks"][:1]), ("the others", of["ranks"][1:])):
            if members:
                most = {what: max(rank[what] for rank in members) / of["parameters"] for what in members[0]}
                goal = f"{1.2 * share + tensor:.2f}"
                numbers = [f"{most[what]:.2f}" for what in ("load", "kept", "publish")]
                out.append([str(ranks), name, f"{share:.2f}", goal, *numbers])
    return out


def main(args: Args) -> None:
    path, results = Path(tempfile.mkdtemp(prefix="rl-benchmark-load-")), {}
    try:
        subprocess.run([sys.executable, __file__, "--save", args.size, str(path)], check=True, cwd=ROOT)
        for ranks in args.ranks:
            # glibc keeps freed tensors below 32 MB for itself: those of a model worth sharding are larger
            done = run(
                [sys.executable, *torchrun(__file__, ranks), "--measure", str(path)], 1, MALLOC_MMAP_THRESHOLD_=str(1 << 20)
            )
            results[ranks] = json.loads(done.output.splitlines()[-1])
    finally:
        shutil.rmtree(path, ignore_errors=True)
    head = ["learners", "rank", "its part", "goal: 1.2 parts and a tensor", "load", "kept", "publish"]
    parameters = next(iter(results.values()))["parameters"]
    text = f"Bytes a parameter, at most of any rank; a whole model in fp32 is 4.00. {parameters / 1e6:,.0f}M parameters.\n\n"
    write(
        "load",
        {str(ranks): of for ranks, of in results.items()},
        f"{text}{table(head, rows(results))}\n\n{words(setting())}.",
        args.out,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        save_model(*sys.argv[2:])
    elif sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    else:
        main(tyro.cli(Args, description=__doc__))
