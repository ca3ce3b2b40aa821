"""Started by test_layouts.py: runs `learn` of train_sync.py on the same batches, for each layout of ranks and each
loss.

torchrun ... layouts.py OUT JSON
{"layouts": {name: [model, flags]}, "cases": {name: [flags, sizes of the responses of each group]}, "attention": kind,
 "rows": null or a file, "equal": numbers of groups whose scores are equal, "every_other": whether neighbours among the layouts
 divide the cases between them}

Prompts are random, or those of the file, which may have images: the first row's belong to the first group. What trains nothing
passes forward alone, however few tokens that are. In cases that begin with "turns" some tokens are an environment's.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "model"))
import packed_kernels as kernels
from helpers import make_group, whole, with_routes
from test_vision import dataset

import train_sync
from rl import parts
from rl.data.prompts import PromptOrder
from rl.learning import batch as batches
from rl.learning.batch import Batch, Division
from rl.learning.batch_images import BatchImages
from rl.model.pretrained import load_config
from rl.ranks import process
from rl.ranks.timers import Timers
from rl.samples.group import Group
from rl.setup import make_learner


class BothWays(train_sync.Args):
    """All tokens get a backward pass."""

    skips_backward = False


def batch_of(model: str, sizes: list[list[int]], what: dict, division: Division, routes: bool) -> Batch:
    rng, rows = np.random.default_rng(0), what["rows"]
    groups = []
    for t, n in enumerate(sizes):
        score = 0.3 if t in what["equal"] else None
        groups.append(make_group(t, n, prompt=int(rng.integers(1, 13)), rng=rng, score=score, masked=what["masked"]))
    if rows is None:
        return Batch.of(routed(model, groups) if routes else groups, division)
    prompts = dataset(model, rows)
    for ticket, (group, prompt) in enumerate(zip(groups, prompts, strict=False)):
        digest = prompt.images.digest if prompt.images else ""
        groups[ticket] = Group(ticket, np.array(prompt.ids, np.int32), "demo", group.responses, images=digest)
    batch = Batch.of(groups, division)
    batch.images = BatchImages(prompts, PromptOrder(len(prompts), 0, shuffle=False), groups, division.ranks)
    return batch


def routed(model: str, groups: list[Group]) -> list[Group]:
    """Add routes as if a generator had sent each token to random experts."""
    config, rng = load_config(model), np.random.default_rng(1)
    layers = config.num_hidden_layers - len(getattr(config, "mlp_only_layers", None) or ())
    experts, per_token = config.num_experts, config.num_experts_per_tok
    draw = lambda n: rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (n, layers, 1)), axis=2)[..., :per_token]  # noqa: E731
    return [with_routes(group, draw) for group in groups]


def learn(model: str, sizes: list[list[int]], flags: dict, ranks, what: dict) -> dict:
    """Return the gradient of each update, the metrics, the final weights, and the share of forward-only tokens."""
    lengths = {"max_prompt_length": 12, "max_response_length": max(map(max, sizes))}
    kind = BothWays if flags.pop("both_ways", False) else train_sync.Args
    args = parts.make(kind, model=model, train_batch_size=len(sizes), lr_warmup_steps=0, **lengths, **flags)
    learner = make_learner(args, SimpleNamespace(path=model, total_steps=10), ranks)
    gradients, step = [], learner.step

    def recorded() -> dict:
        trained = [p for p in learner.policy.parameters() if p.requires_grad]
        gradients.append(torch.cat([whole(p.grad).flatten() for p in trained]))
        return step()

    learner.step = recorded
    batch = batch_of(model, sizes, what, Division.of(args, learner), args.learner.router_replay == "R3")
    metrics = train_sync.learn(args, learner, batch, Timers())
    alone = metrics.pop("perf/forward_only")
    metrics |= learner.router_metrics()
    weights = torch.cat([w.flatten() for _, w in learner.weights()])
    return {"gradients": gradients, "metrics": metrics, "weights": weights, "forward_only": alone}


def main(ranks) -> None:
    out, what = sys.argv[1], json.loads(sys.argv[2])
    found, batches.A_PASS = {}, 0
    if what["attention"] != "cpu":
        kernels.give_to_cpu(what["attention"])
    for number, (layout, (model, flags)) in enumerate(what["layouts"].items()):
        for place, (case, (more, sizes)) in enumerate(what["cases"].items()):
            if what["every_other"] and (number + place) % 2:
                continue
            what["masked"] = case.startswith("turns")
            found[f"{layout}/{case}"] = learn(model, sizes, flags | more, ranks, what)
    if ranks.is_main:
        torch.save(found, out)


process.run(main)
