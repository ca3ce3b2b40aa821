"""Counts the learner's memory without its device: the learner's own code runs, as the first of many ranks, on tensors without
values.

The whole step runs with the flags as given: load, packing, log-probs, reference, losses, backward, clip, optimizer, publish. To
save time only the two largest micro-batches of any rank are computed, because one lives at a time and the second meets the
gradients of the first; prompts that these do not need are left out. Only config.json is read, and for a model that takes images
the files that tools/plan/images.py names.
"""

import dataclasses
import importlib
import multiprocessing
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch.distributed import HashStore
from transformers import PretrainedConfig

from rl import parts
from rl.algorithm import whole_batch
from rl.algorithm.teacher import teacher_path
from rl.data.image_prompts import KEPT_BYTES, Images
from rl.learning import placement
from rl.learning.batch import Batch, Division, MicroBatch, pack
from rl.learning.learner import Learner
from rl.model.loading import Weights
from rl.model.pretrained import check_lengths, empty_model, load_config, resolve, takes_images
from rl.model.sampling_mask import most_tokens
from rl.model.sequence_parallel import check_heads
from rl.ranks import dist
from rl.ranks.dist import Ranks
from rl.ranks.launch import Node
from rl.ranks.shards import Block, local
from rl.ranks.timers import Timers
from rl.samples.group import Group, Response
from rl.setup import CommonArgs, make_learner
from rl.split import Split
from rl.weights.publish import Publisher
from tools.plan.fake_device import FakeDevice, start
from tools.plan.images import PlannedImages, Prompt, prompts_with_images
from tools.plan.memory_count import OTHER, MemoryCount
from tools.plan.workload import Drawn

MICROS = 4  # micro-batches a rank for which prompts are drawn


@dataclass(frozen=True)
class Memory:
    """What a learner holds, in bytes, by cause; of host memory, the samples aside, which the ranks of a node share."""

    device: Counter  # at the device's peak
    kept: Counter  # on the device between two steps
    host: Counter  # in host memory at its peak, of the first learner
    host_kept: Counter  # between two steps, of any learner
    parameters: int
    saved: int  # bytes of a checkpoint
    tokens: int  # of the largest micro-batch
    samples: int  # bytes of a prompt's responses as they come from the generators

    @property
    def peak(self) -> int:
        return self.device.total()


def dry_run(
    script: str, args: CommonArgs, learners: int, attention: str, workload: Drawn, image_size: str | None = None
) -> Memory:
    """Count in a separate process, because the fake device stays, forked from a fresh one: once a backward pass has run,
    autograd accepts no new device. attention: see fake_device.start; image_size: see tools/plan/images.py. Raise UserError if
    the run itself would refuse its flags."""
    resolve(args.model)  # here, since a demo model is trained when it is first asked for
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, script])
    own = {name: parts.get(args, name) for name in parts.leaves(importlib.import_module(script).Args)}
    try:
        with ProcessPoolExecutor(1, context) as process:
            return process.submit(_run, script, own, learners, attention, workload, image_size).result()
    except BrokenProcessPool:
        raise RuntimeError("the dry run ended without a result") from None


def _check_models(args: CommonArgs, path: str, config: PretrainedConfig) -> None:
    """Raise UserError for a model that the run would refuse. config: the policy's, at `path`."""
    check_heads(config, args.learner.sequence_parallel)
    check_lengths(config.get_text_config(), args)
    if args.teacher.teacher:
        load_config(teacher_path(args, path), args.trust_remote_code, "--teacher")
    if args.critic.critic_model:
        load_config(resolve(args.critic.critic_model), args.trust_remote_code, "--critic-model")


def _run(name: str, flags: dict, learners: int, attention: str, workload: Drawn, image_size: str | None) -> Memory:
    script = importlib.import_module(name)
    # compiled code computes the same
    args = parts.make(script.Args, **flags | {"compile": False})
    path = resolve(args.model)
    config = load_config(path, args.trust_remote_code)
    exported = config.dtype or torch.float32  # `empty_model` changes it
    _check_models(args, path, config)
    shapes = {p.shape for p in empty_model(config, args.trust_remote_code).parameters() if p.dim() > 1}
    placement.open_weights = _unread
    placement.check_policy = lambda *_: None
    ranks = start(learners, attention)
    count = MemoryCount(config.get_text_config().vocab_size, shapes)
    with FakeDevice() as fake, count:
        dist.init_device_mesh = fake.host_too(False)(dist.init_device_mesh)  # ranks are counted in real numbers
        with fake.host_too():
            learner = make_learner(args, _job(args, path), ranks)
        read = count.host.at_peak
        count.host.peak = 0
        count.host.at_peak = Counter()
        place = learner.ranks
        prompts = prompts_with_images(args, path, config, image_size, workload.prompt, fake) if takes_images(config) else None
        groups, images = make_groups(workload, args, place, prompts)
        of_step = len(groups) / args.schedule.prompts_per_step
        learner.ranks, micros = _fullest_rank(groups, args, place)
        batch = _batch(groups, Division.of(args, learner), PlannedImages(images) if prompts else None, count)
        tokens = _learn(script, args, learner, batch)
        learner.ranks = place
        kept = [_publish(args, learner, place, fake), _checkpoint_copy(args, learner, fake)]
        for ledger in (count.host.live, count.host.at_peak):
            ledger["batch"] = int(ledger.pop(OTHER, 0) / of_step)
            if prompts:  # pixels of two micro-batches; a run keeps those of all, within its limit
                ledger["images"] = min(KEPT_BYTES, int(ledger["images"] / of_step * micros / min(2, micros)))
        parameters = sum(p.numel() for p in learner.parameters.values())
        state = sum(tensor.numel() * tensor.itemsize for tensor in learner.state_tensors().values())
        memory = Memory(
            device=count.device.at_peak,
            kept=+count.device.live,
            host=max(read, +count.host.at_peak, key=Counter.total),
            host_kept=+count.host.live,
            parameters=parameters,
            saved=state + parameters * exported.itemsize,
            tokens=tokens,
            samples=sum(len(group.to_bytes()) for group in groups) // len(groups),
        )
        del kept
    return memory


def _job(args: CommonArgs, path: str) -> SimpleNamespace:
    """What a learner is made of. All of the teacher's prompts are of full length."""
    of_teacher = SimpleNamespace(ids_of=lambda *_: [0] * args.longest[0])
    return SimpleNamespace(path=path, total_steps=args.total_training_steps or 10**6, order=None, teacher_prompts=of_teacher)


def _learn(script, args: CommonArgs, learner: Learner, batch: Batch) -> int:
    """Learn from the two fullest micro-batches of the rank, twice: the second update begins with the optimizer's state.
    Return the tokens of the fullest."""
    sizes = []
    whole_batch.forward_only = lambda batch, micros: micros  # the most that it holds
    script.micro_batches = _two_fullest(script.micro_batches, sizes)
    for _ in range(2):
        script.learn(args, learner, batch, Timers())
    return max(sizes)


class _Unread(Weights):
    """Tensors of the right size."""

    def whole(self, name: str) -> torch.Tensor:
        return torch.empty(self.model.get_parameter(name).shape)

    def part(self, name: str, block: Block) -> torch.Tensor:
        return torch.empty(block.shape)


def _unread(path: str, trust_remote_code: bool, *_) -> Weights:
    """Replaces open_weights."""
    model = empty_model(load_config(path, trust_remote_code), trust_remote_code)
    for name, buffer in dict(model.named_buffers()).items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.empty_like(buffer, device="cpu"))
    return _Unread(path, model, {}, {})


def make_groups(
    workload: Drawn, args: CommonArgs, ranks: Ranks, prompts: Callable[[int], Prompt] | None
) -> tuple[list[Group], list[Images | None]]:
    """Return an update's prompts with their responses and images, or as many as fill MICROS micro-batches per rank.
    prompts: ticket -> the prompt, if the model takes images."""
    room = MICROS * args.learner.max_tokens_per_micro_batch * ranks.world_size
    groups = []
    images = []
    tokens = 0
    while len(groups) < args.schedule.prompts_per_update and tokens < room:
        ticket = len(groups)
        lengths = workload.group(ticket)
        ids, of_prompt = prompts(ticket) if prompts else (np.zeros(workload.prompt, np.int32), None)
        most = most_tokens(args.sampling)
        responses = [_response(n, number, most) for number, n in enumerate(lengths[: args.sampling.rollout_n])]
        groups.append(Group(ticket, ids, "plan", responses))
        images.append(of_prompt)
        tokens += sum(lengths) + len(ids) * len(lengths)
    return groups, images


def _batch(groups: list[Group], division: Division, images: PlannedImages | None, count: MemoryCount) -> Batch:
    """Return this rank's part of a batch, with all of its tensors counted."""
    batch = Batch.of(groups, division)
    batch.images = images
    for tensor in vars(batch).values():
        if isinstance(tensor, torch.Tensor):
            count.note(tensor, OTHER)  # including those that numpy has made
    return batch


def _response(tokens: int, number: int, support: int) -> Response:
    ids, versions, log_probs = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    record = np.zeros((tokens, support), np.int32) if support else None
    return Response(ids, log_probs, versions, "stop", score=float(number), support=record)


def _fullest_rank(groups: list[Group], args: CommonArgs, ranks: Ranks) -> tuple[Ranks, int]:
    """The rank with the largest micro-batch of all, and how many each has."""
    rows = [(number, len(g.prompt_ids), len(r.token_ids)) for number, g in enumerate(groups) for r in g.responses]
    lengths, prompts = [prompt + response for _, prompt, response in rows], [prompt for _, prompt, _ in rows]
    budget = args.learner.max_tokens_per_micro_batch * ranks.sequence_parallel
    plan = pack(lengths, prompts, [number for number, *_ in rows], budget, ranks.data_size)
    loads = [max(sum(lengths[i] for i in part) for part in of_rank) for of_rank in plan]
    return dataclasses.replace(ranks, rank=loads.index(max(loads)) * ranks.sequence_parallel), len(plan[0])


def _two_fullest(micro_batches: Callable[..., list[MicroBatch]], sizes: list[int]) -> Callable[..., list[MicroBatch]]:
    """sizes: takes the tokens of the fullest one of each call."""

    def fullest(*what) -> list[MicroBatch]:
        micros = sorted(micro_batches(*what), key=lambda micro: -micro.inputs["input_ids"].numel())
        sizes.append(micros[0].inputs["input_ids"].numel())
        return micros[:2]

    return fullest


def _publish(args: CommonArgs, learner: Learner, ranks: Ranks, fake: FakeDevice) -> object:
    """Publish as the first learner does. Return what it holds from then on."""
    dtype = args.engine.weights_dtype(args.learner.dtype)
    if args.schedule.split:
        node = Node("here", first=0, size=ranks.world_size + 1, generators=1)
        bridge = SimpleNamespace(device=torch.device("cpu"))
        split = Split(
            "learner", ranks, learners=ranks.world_size, generators=1, nodes=[node], node=0, store=HashStore(), bridge=bridge
        )
        with fake.host_too():
            publisher = Publisher(learner, split, dtype)
        publisher.take_copy()
        return publisher
    for _ in learner.weights(dtype):
        pass


def _checkpoint_copy(args: CommonArgs, learner: Learner, fake: FakeDevice) -> list[torch.Tensor]:
    """Return what rl/checkpoint/saver.py copies before it writes; nothing for a run that only saves at its end."""
    state = learner.state_tensors().values() if args.checkpoint.save_freq > 0 else ()
    with fake.host_too():
        return [torch.empty(local(tensor).shape, dtype=tensor.dtype) for tensor in state]
