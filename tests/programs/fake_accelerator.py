"""Started by test_fake_accelerator.py: our own code on fake devices, each case in a fork of this process.

python fake_accelerator.py PART '{"qwen3": PATH, ...}'               PART: quick, or 0 to 2 for a third of the others

Prints a line of JSON: case -> "" or its error.
"""

import dataclasses
import json
import os
import sys
import traceback
from types import SimpleNamespace

import numpy as np
import torch
from helpers import make_group, with_routes
from strict_device import StrictDevice, start
from tiny_vlm import picture, prompt_with_images, prompts_by_number
from torch.distributed import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

import train_async
import train_one_step_off
import train_sync
from rl import parts
from rl.algorithm import whole_batch
from rl.algorithm.critic import Critic
from rl.algorithm.metrics import perf_metrics
from rl.algorithm.teacher import Teacher
from rl.data.prompts import Prompt
from rl.generation import make as engines
from rl.generation.embedded import TransformersEngine
from rl.generation.engine import Request, SamplingParams
from rl.learning import batch as batches
from rl.learning import compact_adamw
from rl.learning.batch import Batch, Division
from rl.learning.batch_images import BatchImages
from rl.learning.learner import Learner
from rl.model import policy, sampling_mask
from rl.ranks import device
from rl.ranks.device import is_accelerator
from rl.ranks.dist import Ranks
from rl.ranks.launch import Node
from rl.ranks.timers import Timers
from rl.samples.group import Group
from rl.setup import LocalWeights
from rl.split import Split
from rl.weights.publish import Publisher, PublishPlan, Subscriber
from tools.doctor.measure import memory_left
from tools.plan.fake_device import OWN, aten

SCRIPTS = {"sync": train_sync, "one step off": train_one_step_off, "async": train_async}


class Bridge:
    """A bridge whose broadcasts stay on the device and arrive at once."""

    window, is_far = 3, True

    def __init__(self, device: torch.device):
        self.device = device

    def broadcast(self, tensor: torch.Tensor) -> "Bridge":
        assert tensor.device == self.device and tensor.is_contiguous()
        if tensor.device.type == "cpu":  # which has values
            tensor.zero_()
        return self

    def wait(self) -> None: ...


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device: values that it reads, and copies of memory that is not pinned."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not OWN.issuperset(types):
            return NotImplemented
        kwargs = kwargs or {}
        x, to = (args or [None])[0], kwargs.get("device")
        crosses = func is aten._to_copy.default and to and is_accelerator(torch.device(to)) != is_accelerator(x.device)
        reads = func is aten._local_scalar_dense.default and is_accelerator(x.device)
        self.count += bool(reads or (crosses and not kwargs.get("non_blocking")))
        return func(*args, **kwargs)


def with_images(path: str, groups: list[Group], division: Division, ranks: Ranks) -> Batch:
    """The groups behind prompts of the model's own."""
    prompts = []
    for number, (ids, images) in enumerate(prompts_by_number(path, len(groups))):
        prompts.append(Prompt(ids, "", "demo", "", {}, f"row {number}", images))
        digest = images.digest if images else ""
        groups[number] = dataclasses.replace(groups[number], prompt_ids=np.array(ids, np.int32), images=digest)
    batch = Batch.of(groups, division)
    batch.images = BatchImages(prompts, lambda ticket: (0, ticket), groups, ranks)
    return batch


def with_support(group: Group, most: int) -> Group:
    """Add the tokens that could be sampled."""
    record = lambda tokens: np.tile(np.arange(most, dtype=np.int32), (tokens, 1))  # noqa: E731
    responses = [dataclasses.replace(r, support=record(len(r.token_ids))) for r in group.responses]
    return dataclasses.replace(group, responses=responses)


def learn(
    path: str,
    ranks=1,
    rank=0,
    script="sync",
    logits_at_once=None,
    attention="npu",
    images=False,
    prompts=2,
    over_host=False,
    equal=(),
    waits=None,
    **flags,
) -> None:
    """Two updates of a learner, number `rank` of `ranks`: packing, log-probs, reference, losses, backward, optimizer; then a
    publish, and what a checkpoint holds. equal: prompts all of whose scores are equal. waits: times that the host waits for the
    device in the updates."""
    place, script, compact_adamw.adamw = start(ranks, attention), SCRIPTS[script], adamw
    policy.LOGITS_AT_ONCE = logits_at_once or policy.LOGITS_AT_ONCE
    flags = {"dtype": "float32", "max_tokens_per_micro_batch": 160 if images else 64} | flags
    args = parts.make(script.Args, model=path, rollout_n=4, ppo_mini_batch_size=1, **flags)
    groups = [make_group(t, [3, 9, 5, 7], score=0.3 if t in equal else None) for t in range(prompts)]
    batches.A_PASS = 0  # tokens
    device.LEAST = 512  # bytes: also of small tensors several are cut out of one block
    if args.learner.router_replay == "R3":
        two = np.array([3, 5], np.uint8)  # of each layer's experts
        groups = [with_routes(group, lambda tokens: np.tile(two, (tokens, 2, 1))) for group in groups]
    if most := sampling_mask.most_tokens(args.sampling):
        groups = [with_support(group, most) for group in groups]
    with StrictDevice():
        assert device.kind() == place.device.type == torch.empty(1, device=place.device).device.type
        model = Learner(path, args.learner, place, 10, with_reference=args.loss.needs_reference)
        if args.teacher.teacher:
            prompts = SimpleNamespace(ids_of=lambda order, ticket, ids: [3] * 40 + ids)
            model.teacher = Teacher.of(args, SimpleNamespace(order=None, teacher_prompts=prompts), model)
        if args.loss.needs_critic:
            model.critic = Critic(path, args, model.ranks, 10)
        model.ranks = dataclasses.replace(model.ranks, rank=rank)  # whose micro-batches it takes
        model.state_tensors()  # as a resume begins
        divided = Division.of(args, model)
        batch = with_images(path, groups, divided, model.ranks) if images else Batch.of(groups, divided)
        find, apart = whole_batch.forward_only, []

        def forward_only(*of) -> list:
            found = find(*of)
            apart.extend(micro for of_mini in found for micro in of_mini if micro.forward_only)
            return found

        whole_batch.forward_only = forward_only
        with Waits() as seen:
            metrics = script.learn(args, model, batch, Timers())
        assert waits in (None, seen.count), seen.count
        metrics |= perf_metrics(model, batch, {"update_actor": 1.0}, place.world_size, metrics["perf/forward_only"])
        assert {"actor/grad_norm", "actor/loss", "perf/max_memory_allocated_gb"} <= set(metrics)
        assert bool(apart) == bool(equal)
        host = torch.device("cpu")
        home = host if args.learner.param_offload else place.device
        model.router_metrics()
        tensors = model.state_tensors()
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("critic.")}
        trained = len(model.adapters.tensors) if model.adapters else len(model.parameters) - len(model.frozen)
        assert len({name for name in tensors if "_scale" not in name}) == 3 * trained
        assert any("_scale" in name for name in tensors) == (args.learner.optim == "adamw_8bit")
        assert {state["step"].device for state in model.optimizer.state.values()} == {home}
        for name, tensor in tensors.items():
            rests = args.learner.optimizer_offload and name.startswith("exp")
            assert tensor.device == (host if rests else home)
        assert {buffer.device for buffer in model.policy.buffers()} == {place.device}
        model.state(), model.rank_state()
        for _, weight in model.weights(torch.bfloat16):
            assert weight.device == place.device
        publish(
            model, Split("learner", place, place.world_size, 1, 0, 1, HashStore(), Bridge(host if over_host else place.device))
        )


def adamw(*lists, state_steps, step=compact_adamw.adamw, **more) -> None:
    """torch's, whose stand-in for fake tensors does not look where they are."""
    assert len({tensor.device for tensors in (*lists, state_steps) for tensor in tensors}) == 1
    step(*lists, state_steps=state_steps, **more)


def publish(model: Learner, split: Split) -> None:
    publisher = Publisher(model, split, torch.bfloat16)
    publisher.publish(0)
    publisher.wait()


def generate(path: str, dtype=torch.float32, truncates=True, attention="npu", images=False, over_host=False) -> None:
    """An engine's life: prefill, decoding and sampling, new weights while responses are under way, their digests. over_host:
    whether the weights travel in host memory."""
    place = start(attention=attention)
    with StrictDevice():
        store, bridge = HashStore(), Bridge(torch.device("cpu") if over_host else place.device)
        engine = TransformersEngine(path, 96 if images else 32, 4, 16, dtype, place.device, end_tokens={1})
        plan = PublishPlan(
            [n for n, _ in engine.model.named_parameters()], [list(p.shape) for p in engine.model.parameters()], dtype
        )
        store.set("weights/plan", plan.to_json())
        place = dataclasses.replace(place, local_rank=1)  # behind the learner
        subscriber = Subscriber(Split("generator", place, 1, 1, [Node("", 0, 2, 1)], 0, store, bridge), engine)
        assert subscriber._memory.device == place.device
        subscriber.receive(0)
        for number in range(6):
            sampling = SamplingParams(number % 2, 0.9 if truncates else 1.0, 5 if truncates else -1, max_tokens=2 + number)
            if truncates and number > 3:
                sampling = dataclasses.replace(sampling, support=7)
            ids, of_prompt = [2, 3, 4 + number // 2], None
            if images:
                ids, of_prompt = prompt_with_images(path, "what?", [picture(64, 64, number // 2)] * (number // 2))
            engine.add(Request(number, ids, sampling, seed=number, images=of_prompt))
        done = engine.step()
        engine.version = -1
        subscriber.receive(0, recompute_kv=True)
        while engine.num_unfinished:
            done += engine.step()
        assert sorted(len(output.token_ids) for output in done) == [2, 3, 4, 5, 6, 7]
        held = [engine.cache.data, *(x for x in vars(engine).values() if isinstance(x, torch.Tensor))]
        assert {x.device for x in held} == {place.device}
        engine.sleep()


def turns(path: str, **flags) -> None:
    """A rank that learns and generates in turns: its engine takes the learner's weights twice."""
    place, args = start(), parts.make(train_sync.Args, model=path, engine="embedded", max_num_seqs=4, **flags)
    engines.load_tokenizer, engines.end_token_ids = (lambda *_: None), (lambda *_: {1})
    with StrictDevice():
        model = Learner(path, args.learner, place, 10)
        engine = engines.make_engine(path, args.engine, 32, args.engine.weights_dtype(args.learner.dtype), place.device, False)
        held = LocalWeights(model, engine, args.engine.weights_dtype(args.learner.dtype))
        for version in range(2):
            held.publish(version)
        assert {x.device for x in engine.model.parameters()} == {engine.device} == {place.device}


def lacks(kind: str) -> None:
    """Check that an operation that the device lacks raises an error, and that all others do not."""
    place = start(2, attention=kind).device
    with StrictDevice():
        x = torch.ones(4, device=place)
        tries = {
            "nextafter": lambda: x.nextafter(x),
            "special.entr": lambda: torch.special.entr(x),
            "mkldnn": lambda: torch.ops.aten.mkldnn_linear(x[None], x[None]),
            "xlogy": lambda: torch.xlogy(x, x),
            "addition in place": lambda: x.add_(1),
            "a sum in float64": lambda: torch.distributed.all_reduce(x.double()),
            "a sum in bf16": lambda: torch.distributed.all_reduce(x.bfloat16()),
            "float64 sent": lambda: torch.distributed.broadcast(x.double(), 0),
            "int16 sent": lambda: torch.distributed.broadcast(x.short(), 0),
            "the allocator": lambda: torch.accelerator.max_memory_allocated(),
            "its module": lambda: device.memory_gb() and memory_left(),
        }
        refused = {name for name, act in tries.items() if is_refused(act)}
    expected = {
        "npu": {"nextafter", "special.entr", "mkldnn", "a sum in float64", "the allocator"},
        "cuda": {"mkldnn", "int16 sent"},
    }
    assert refused == expected[kind], refused


def is_refused(act) -> bool:
    try:
        act()
    except (NotImplementedError, RuntimeError):
        return True
    return False


COMPACT = {"optim": "adamw_8bit", "optimizer_offload": True, "gradient_checkpointing": True}
SPARING = {"param_offload": True, "gradient_checkpointing": True}
TRUNCATED = {"top_k": 3, "keep_sampling_mask": True, "loss_mode": "reinforce"}
QUICK = ["many ranks", "offload", "compact", "without advantage", "engine", "what an NPU lacks", "what CUDA lacks"]
CASES = {  # a new kind of model is a line more
    "shared sequences, what could be sampled": lambda m: learn(
        m["qwen3"], 4, 1, "async", dtype="bfloat16", sequence_parallel=2, kl_loss_coef=1e-3, **TRUNCATED
    ),
    "one rank, over the host": lambda m: learn(m["qwen2-tied"], over_host=True, dtype="bfloat16", kl_loss_coef=1e-3),
    "many ranks": lambda m: learn(
        m["qwen3"], 4, 0, "one step off", 160, "cuda", dtype="bfloat16", kl_loss_coef=1e-3, entropy_coeff=0.1, waits=6
    ),
    "offload": lambda m: learn(  # in fp32, for which CUDA has no attention over packed rows
        m["qwen2-untied"], 2, 1, "async", None, "cuda", kl_reward_coef=1e-3, **SPARING
    ),
    "without advantage": lambda m: learn(m["qwen3"], 2, 0, equal=(1,), gradient_checkpointing=True),
    "compact": lambda m: learn(m["qwen3"], 2, 1, "one step off", dtype="bfloat16", **COMPACT),
    "delta nets": lambda m: learn(m["qwen3_5"], 4, 0, gradient_checkpointing=True),
    "engine, delta nets": lambda m: generate(m["qwen3_5"]),
    "engine": lambda m: generate(m["qwen2-tied"]),
    "engine, CUDA's attention, over the host": lambda m: generate(
        m["qwen3"], torch.bfloat16, truncates=False, attention="cuda", over_host=True
    ),
    "what an NPU lacks": lambda m: lacks("npu"),
    "what CUDA lacks": lambda m: lacks("cuda"),
    "experts, replayed": lambda m: learn(
        m["moe"], 1, 0, "async", None, "cuda", dtype="bfloat16", router_replay="R3", **SPARING
    ),
    "shared experts and sequences": lambda m: learn(
        m["moe"], 4, 3, "one step off", expert_parallel=4, sequence_parallel=2, router_replay="R3", dtype="bfloat16"
    ),
    "images, windows": lambda m: learn(m["qwen2.5-vl"], 2, 1, images=True, prompts=3, dtype="bfloat16", **SPARING),
    "images, a frozen tower": lambda m: learn(m["qwen3-vl"], 1, images=True, freeze_vision_tower=True),
    "engine, images": lambda m: generate(m["qwen3-vl"], images=True),
    "images, shared sequences": lambda m: learn(
        m["qwen3-vl"],
        4,
        1,
        "async",
        images=True,
        prompts=3,
        sequence_parallel=2,
        kl_loss_coef=1e-3,
        gradient_checkpointing=True,
    ),
    "adapters, a teacher's tokens": lambda m: learn(
        m["qwen3"], 2, 0, lora_rank=2, kl_loss_coef=1e-3, param_offload=True, teacher=m["qwen3"], teacher_top_k=2
    ),
    "a teacher's prompts": lambda m: learn(m["qwen3"], 4, 2, sequence_parallel=2, teacher="self", teacher_prompt="{prompt}"),
    "a critic": lambda m: learn(m["qwen3"], 2, 0, adv_estimator="gae", gamma=0.9),
    "in turns, images": lambda m: turns(m["qwen3-vl"], freeze_vision_tower=True, dtype="bfloat16"),
}


def in_fork(act) -> str:
    """Run the function in a fork. Return the last line of its error, or "" if there is none."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.dup2(writer, 2)  # a fault in a backward pass ends the process: it is what was printed
        code = 1
        try:
            act()
            code = 0
        except BaseException as error:
            traceback.print_exc()
            print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr, flush=True)
        os._exit(code)
    os.close(writer)
    with open(reader) as lines:
        said = lines.read()
    _, status = os.waitpid(pid, 0)
    return said if status else ""


if __name__ == "__main__":
    part, models = sys.argv[1], json.loads(sys.argv[2])
    names = [name for name in CASES if name not in QUICK][int(part) :: 3] if part != "quick" else QUICK
    print(json.dumps({name: in_fork(lambda name=name: CASES[name](models)) for name in names}))
