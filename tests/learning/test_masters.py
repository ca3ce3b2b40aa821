"""Fp32 master weights with bf16 compute weights: bit for bit the results of FSDP's fp32 weights, on any layout, and in host
memory in any order that a device's queues allow."""

import itertools
import random
from collections import defaultdict

import pytest
import torch
from layouts import ALONE, learn_on
from test_compact_memory import copy_state, make_learner, update, weights
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rl.learning import compact_adamw
from rl.learning.compact_adamw import CompactAdamW
from rl.learning.overlapped import overlapped
from rl.model.shards import local

ON_HOST = {"dtype": "bfloat16", "optimizer_offload": True}


@pytest.mark.parametrize("on_host", [True, False])
def test_weights_gradients_and_metrics_are_those_of_fp32_weights(models, ranks, on_host):
    """Which FSDP has where parameters are moved. Routers, tied embeddings and norms among them; gradients of several
    micro-batches are summed in fp32."""
    plain = make_learner(models["moe"], ranks, dtype="bfloat16", param_offload=True)
    other = make_learner(models["moe"], ranks, dtype="bfloat16", optimizer_offload=on_host)
    for seed in range(2):
        assert update(plain, seed) == update(other, seed)
    assert {p.dtype for p in other.parameters.values()} == {torch.bfloat16} != {p.dtype for p in plain.parameters.values()}
    assert all(torch.equal(local(p).bfloat16(), other.parameters[name]) for name, p in plain.parameters.items())
    for dtype in (torch.float32, torch.bfloat16):  # what is published
        pairs = zip(plain.weights(dtype), other.weights(dtype), strict=True)
        assert all(a[0] == b[0] and torch.equal(a[1].to(dtype), b[1].to(dtype)) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"grad_dtype": "bfloat16"}, {"optim": "adamw_8bit"}])
@pytest.mark.parametrize("flags", itertools.permutations([{"dtype": "bfloat16"}, ON_HOST]))
def test_a_run_resumes_with_or_without_the_flag_bit_for_bit(models, ranks, flags, more):
    whole, half, rest = (make_learner(models["moe"], ranks, **of, **more) for of in (flags[0], *flags))
    for seed in range(3):
        update(whole, seed)
        if seed < 2:
            update(half, seed)
    copy_state(half, rest)
    assert update(rest, 2)["actor/grad_norm"] > 0
    assert torch.equal(weights(rest), weights(whole))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"sequence_parallel": 2}, {"expert_parallel": 2}])
def test_two_learners_compute_the_same_bits(models, layout):
    cases = {"gspo": ({"loss_mode": "gspo", "ppo_mini_batch_size": 1}, [[3, 9, 5], [7, 2, 4]])}
    flags = {"dtype": "bfloat16", **layout, **ALONE}
    layouts = {"plain": [models["moe"], flags], "host": [models["moe"], flags | ON_HOST]}
    found = learn_on(2, layouts, cases)
    plain, host = found["plain/gspo"], found["host/gspo"]
    assert torch.equal(plain["weights"], host["weights"]) and plain["metrics"] == host["metrics"]
    assert all(torch.equal(*both) for both in zip(plain["gradients"], host["gradients"], strict=True))


# ------------------------------------------------------------------------------------------------ queues of a device


class Device:
    """A device's queues as a CPU plays them: what they are given is computed when somebody waits, as late and in as odd an
    order as streams and events allow."""

    def __init__(self, seed: int):
        self.random, self.at, self.queues, self.most = random.Random(seed), "work", defaultdict(list), 0
        self.done = defaultdict(int)  # of each queue

    def streams(self, _device=None) -> tuple["Stream", "Stream"]:
        return Stream(self, "in"), Stream(self, "out")

    def give(self, what, needs=None) -> None:
        self.queues[self.at].append((what, needs))

    def play(self, until) -> None:
        """Until that event, (queue, number of entries), has happened."""
        while self.done[until[0]] < until[1]:
            able = [name for name, queue in self.queues.items() if self.done[name] < len(queue) and self._may(name)]
            name = self.random.choice(able)
            what, _ = self.queues[name][self.done[name]]
            self.done[name] += 1
            with _disable_current_modes():
                what()

    def _may(self, name: str) -> bool:
        _, needs = self.queues[name][self.done[name]]
        return needs is None or self.done[needs[0]] >= needs[1]


class Stream:
    def __init__(self, device: Device, name: str):
        self.device, self.name = device, name

    def __enter__(self):
        self.before, self.device.at = self.device.at, self.name

    def __exit__(self, *_):
        self.device.at = self.before

    def record_event(self) -> "Event":
        return Event(self.device, (self.name, len(self.device.queues[self.name])))

    def wait_event(self, event: "Event") -> None:
        self.device.queues[self.name].append((lambda: None, event.when))


class Event:
    def __init__(self, device: Device, when: tuple[str, int]):
        self.device, self.when = device, when

    def synchronize(self) -> None:
        self.device.play(self.when)


class Later(TorchDispatchMode):
    """Operators are queued. What an operator makes is NaN until it has been played."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.is_view or func.namespace == "profiler":
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self.device.give(lambda: func(*args, **kwargs))
            return args[0] if func._schema.returns else None
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 7)

        def play() -> None:
            for tensor, made in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                tensor.copy_(made)

        self.device.give(play)
        return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_copies_under_the_step_change_no_bit_whatever_order_the_queues_allow(monkeypatch, seed, in_8_bits):
    monkeypatch.setattr(compact_adamw, "PIECE", 1)  # 16 rows
    made = torch.Generator().manual_seed(seed)
    start = [torch.randn(rows, 70, generator=made) for rows in (40, 16, 100)]
    gradients = [[torch.randn(x.shape, generator=made) for x in start] for _ in range(2)]
    results = []
    for device in (None, Device(seed)):
        if device:
            monkeypatch.setattr("rl.learning.overlapped.copy_streams", device.streams)
            monkeypatch.setattr(torch.accelerator, "current_stream", lambda _, device=device: Stream(device, "work"))
            monkeypatch.setattr(
                compact_adamw.CompactAdamW, "_fetch", lambda _, piece: {k: x.clone() for k, x in piece.kept.items()}
            )
        parameters = [torch.nn.Parameter(x.bfloat16()) for x in start]
        masters = dict(zip(parameters, (x.clone() for x in start), strict=True))
        optimizer = CompactAdamW(parameters, 0.1, (0.9, 0.95), 0.01, True, in_8_bits, masters)
        for step in gradients:
            for parameter, grad in zip(parameters, step, strict=True):
                parameter.grad_dtype, parameter.grad = None, grad.clone()
                optimizer.begin(parameter)
            if device:
                with Later(device):
                    optimizer.step()
            else:
                optimizer.step()
        if device:
            assert all(device.done[name] == len(queue) for name, queue in device.queues.items() if name == "out")
        state = [tensor for of in optimizer.state.values() for name, tensor in of.items() if name != "step"]
        results.append([*masters.values(), *(p.detach() for p in parameters), *state])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_while_a_piece_is_worked_on_the_next_one_comes_and_the_last_one_goes(monkeypatch):
    """No more than three are on the device; each queue takes them in order."""
    device, held, seen = Device(0), set(), []
    monkeypatch.setattr("rl.learning.overlapped.copy_streams", device.streams)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: Stream(device, "work"))

    class Came:
        def __init__(self, piece):
            self.piece = piece
            held.add(piece)
            seen.append(len(held))

        def __del__(self):
            held.discard(self.piece)

    def given(what):
        def act(piece, *_):
            device.give(lambda: None)
            return Came(piece) if what == "fetch" else None

        return act

    overlapped(None, range(9), given("fetch"), given("work"), given("put"))
    assert max(seen) == 3 and not held
    work = device.queues["work"]
    arrivals = [needs[1] for _, needs in work if needs]
    assert arrivals == list(range(1, 10)), "the n-th piece waits for its own arrival, and for no later one"
    assert [needs for _, needs in device.queues["in"]] == [None] * 9, "what comes waits for no work"
