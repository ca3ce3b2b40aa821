"""The part `memory` of images.py: the bytes that a side's step takes at its peak above what stands before it.

    python benchmarks/scripts/images_memory.py SIDE MODEL ROWS SIZE     # a line of JSON; each side has its own process

All sides have taken a step before: AdamW's moments are there. They train on the same responses, in the same micro-batches:
- update: `learn` of train_sync.py.
- an image for each response: transformers' own forward and backward, every response with its prompt and its prompt's picture.
- counted: of `update`, what cannot be less: the gradients, and what autograd holds for the backward pass when it holds most.
"""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from scripts.images import SIZES, batch_of

import train_sync
from rl.flags import read
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.model.pretrained import load_config
from rl.ranks import dist
from rl.ranks.shards import local
from rl.ranks.timers import Timers


class Held:
    """The bytes that autograd holds for backward passes, each storage once: for saved_tensors_hooks(held.pack, held.unpack)."""

    def __init__(self, without: set[int]):
        self.without, self.now, self.most = without, 0, 0  # without: storages that do not count
        self._times: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> "Saved":
        return Saved(self, tensor)

    def unpack(self, saved: "Saved") -> torch.Tensor:
        return saved.tensor

    def count(self, storage, times: int) -> None:
        if (address := storage.data_ptr()) in self.without:
            return
        was = self._times[address]
        self._times[address] += times
        if not was or not self._times[address]:
            self.now += times * storage.nbytes()
            self.most = max(self.most, self.now)


class Saved:
    def __init__(self, held: Held, tensor: torch.Tensor):
        self.held, self.tensor = held, tensor
        held.count(tensor.untyped_storage(), 1)

    def __del__(self):
        self.held.count(self.tensor.untyped_storage(), -1)


def resident(word: str) -> int:
    """VmRSS, now, or VmHWM, the most since it was cleared, of this process in bytes."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(word))


def plain_step(model: str, batch: Batch, micros: list):
    """A step of transformers' own model as it is."""
    from transformers import AutoModelForImageTextToText

    bare = AutoModelForImageTextToText.from_pretrained(model, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-4, fused=True)
    image, starts = load_config(model).image_token_id, batch.starts.tolist()

    def step() -> None:
        for micro in micros:
            responses = sorted(set(batch.seq[micro.index].tolist()))
            answers = [batch.token[starts[i] : starts[i] + int(batch.lengths[i])] for i in responses]
            rows = [torch.cat([torch.from_numpy(batch.prompts[i]), a]) for i, a in zip(responses, answers, strict=True)]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).long()  # [n, L]
            real = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
            shown = [batch.images._read(int(batch.group[i])) for i in responses]
            longest = max(map(len, answers))
            logits = bare(
                input_ids=ids,
                attention_mask=real.long(),
                mm_token_type_ids=(ids == image).int(),
                pixel_values=torch.cat([of.pixels_of(i) for of in shown for i in range(len(of.sources))]),
                image_grid_thw=torch.cat([of.grid for of in shown]),
                logits_to_keep=longest + 1,
                use_cache=False,
            ).logits[:, :-1]
            log_prob = logits.log_softmax(-1).gather(2, ids[:, -longest:, None])
            (-log_prob[real[:, -longest:]].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(side: str, model: str, file: str, size: str) -> None:
    ranks = dist.init()
    args = read(train_sync.Args, args=["--model", model, "--max-response-length", str(SIZES[size].tokens)])
    batch, held = batch_of(SIZES[size], model, file), None
    if side == "an image for each response":
        members = torch.arange(len(batch.lengths))
        step = plain_step(model, batch, micro_batches(batch, members, 8192, ranks))
    else:
        learns = Learner(model, args.learner, ranks, total_steps=1000)
        parameters = [local(p) for p in learns.policy.parameters()]
        held = Held({p.untyped_storage().data_ptr() for p in parameters})
        step = lambda: train_sync.learn(args, learns, batch, Timers())  # noqa: E731
    step()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    if side == "counted":
        with torch.autograd.graph.saved_tensors_hooks(held.pack, held.unpack):
            step()
        peak = held.most + sum(p.numel() * p.itemsize for p in parameters)
    else:
        step()
        peak = resident("VmHWM") - before
    print(json.dumps({"peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
