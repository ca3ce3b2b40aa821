"""The decisions of rl/ranks/device.py on machines with accelerators (torch's answers are replaced), and a real step."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed
from helpers import ROOT, command, environment

import train_sync
from rl import parts, split
from rl.errors import UserError
from rl.ranks import device, device_groups, launch
from rl.ranks.timers import Timers


@pytest.fixture
def machine(monkeypatch):
    """machine(kind, devices, uuids): makes this a machine with such devices."""

    def make(kind: str, devices: int = 1, uuids: tuple[str, ...] = ()):
        properties = lambda place: SimpleNamespace(**({"uuid": uuids[place.index]} if uuids else {}))  # noqa: E731
        monkeypatch.setattr(device, "kind", lambda: kind)
        monkeypatch.setattr(device, "module", lambda: SimpleNamespace(get_device_properties=properties))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)

    return make


def test_devices_are_distinguished_by_uuid_and_by_what_a_rank_sees(machine, monkeypatch):
    machine("cuda", uuids=("GPU-a", "GPU-b"))
    assert device_groups._number_in_node(torch.device("cuda", 1)) == "GPU-b"
    machine("npu")  # whose properties have no uuid
    for visible, index, expected in (("5", 0, "5"), ("2,7", 1, "7"), ("", 1, "1")):
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
        assert device_groups._number_in_node(SimpleNamespace(type="npu", index=index)) == expected
    assert device_groups._number_in_node(torch.device("cpu")) == "0"


class HCCL:
    """As torch_npu 2.10's ProcessGroupHCCL is bound to Python: no Options with a timeout, no gather."""

    made: ClassVar[list["HCCL"]] = []

    def __init__(self, store, rank: int, size: int, timeout: timedelta):
        self.place, self.sent = (rank, size, timeout), []
        HCCL.made.append(self)

    def broadcast(self, tensors: list, options) -> SimpleNamespace:
        assert len(tensors) == 1 and options.rootRank == 0 and options.rootTensor == 0
        self.sent += tensors
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def hccl(machine, monkeypatch):
    """A machine with NPUs."""
    HCCL.made.clear()
    for name in ("torch_npu", "torch_npu._C"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_npu._C._distributed_c10d", SimpleNamespace(ProcessGroupHCCL=HCCL))
    monkeypatch.setattr(torch, "zeros", lambda *_, device: SimpleNamespace(device=device))
    machine("npu", 2)


@pytest.mark.parametrize(
    ("others", "direct"), [(("npu", 1), True), (("npu", 0), False), (("cpu", None), False)], ids=["own", "shared", "host"]
)
def test_weights_go_over_hccl_where_each_rank_has_an_npu_of_its_own(hccl, others, direct):
    """place: as torch.device would have it; a build without NPUs has none."""
    store, mine = torch.distributed.HashStore(), SimpleNamespace(type="npu", index=0)
    other = SimpleNamespace(type=others[0], index=others[1])
    store.set("device/1", f"{device.platform.node()}/{other.type}/{device_groups._number_in_node(other)}")
    group = device_groups.device_group(store, 0, 2, mine, timedelta(seconds=9))
    assert (group is not None) == direct and store.get("device/own") == str(int(direct)).encode()
    if direct:
        assert HCCL.made == [group] and group.place == (0, 2, timedelta(seconds=9))
        assert [tensor.device for tensor in group.sent] == [mine], "members meet at the start"


def name_devices(devices: list[SimpleNamespace], role: str) -> list[str]:
    """Return the message of `check_own` for ranks 4, 5, ... of a node with these devices, or ""."""
    store, members = torch.distributed.HashStore(), range(4, 4 + len(devices))

    def said(rank: int) -> str:
        try:
            device_groups.check_own(store, members, rank, devices[rank - 4], role)
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(devices)) as pool:  # each waits for the others' word
        return list(pool.map(said, members))


def test_ranks_of_a_role_that_share_a_device_are_refused(machine, monkeypatch):
    place = lambda index: torch.device("cuda", index)  # noqa: E731
    machine("cuda", 2, uuids=("GPU-a", "GPU-b"))
    assert name_devices([place(0), place(1)], "learner") == ["", ""]
    said = name_devices([place(0), place(1), place(0)], "learner")
    assert all("has 3 learners and 2 cuda device(s) for them" in text and "Start at most 2" in text for text in said)
    assert name_devices([torch.device("cpu")] * 3, "generator") == [""] * 3


def test_ranks_to_which_a_launcher_shows_one_device_each_are_taken(machine, monkeypatch):
    """Each rank calls its device number 0. The driver's name for the device differs."""
    names = iter(("GPU-a", "GPU-b", "GPU-c"))
    machine("cuda", 1)
    monkeypatch.setattr(
        device, "module", lambda: SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(uuid=next(names)))
    )
    assert name_devices([torch.device("cuda", 0)] * 3, "rank") == [""] * 3


@pytest.mark.parametrize(("kind", "devices", "waits"), [("cuda", 1, True), ("cuda", 3, False), ("cpu", 0, False)])
def test_learners_that_share_devices_with_engines_load_after_these(machine, monkeypatch, kind, devices, waits):
    machine(kind, devices)
    store, here = torch.distributed.HashStore(), {"local_rank": 0}
    store.set_timeout(timedelta(milliseconds=200))
    monkeypatch.setattr(launch, "nodes", lambda: [launch.Node("a", 0, 3, 2)])  # ranks 1 and 2 generate
    monkeypatch.setattr(launch, "here", lambda: launch.Launch(here["local_rank"], 3, here["local_rank"], 3, 0))
    monkeypatch.setattr(launch, "open_store", lambda timeout: store)
    for started in (1, 2):
        if waits:
            with pytest.raises(torch.distributed.DistStoreError):
                split.engines_first("learner")
        here["local_rank"] = started
        split.engines_first("generator")
        here["local_rank"] = 0
    split.engines_first("learner")


def test_the_precision_follows_the_device_unless_it_is_given(machine):
    machine("cpu")
    assert train_sync.Args().learner.dtype == "float32"
    machine("npu")
    assert train_sync.Args().learner.dtype == "bfloat16"
    assert parts.make(train_sync.Args, dtype="float32").learner.dtype == "float32"


@pytest.mark.parametrize(("kind", "slow"), [("npu", True), ("cuda", False), ("cpu", False)])
def test_requests_have_seeds_of_their_own_but_on_an_npu(machine, kind, slow):
    machine(kind)
    assert device.seeds_are_slow() == slow


def test_decoding_stays_clear_of_cudnns_attention():
    assert os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"


@pytest.mark.device
def test_three_steps_on_the_accelerator(tmp_path):
    if os.environ["RL_DEVICE"] == "cpu":
        pytest.skip("no accelerator: RL_DEVICE says cpu")
    flags = ["--total-training-steps", "3", "--test-freq", "0", "--engine", "embedded", "--output-dir", tmp_path]
    done = subprocess.run(command("train_sync.py", *flags, fresh=True), cwd=ROOT, env=environment(), timeout=280)
    assert done.returncode == 0


def test_the_update_ends_when_the_device_has_done_it(monkeypatch):
    """Its last optimizer step is still under way when the host continues, and would count as the publish's."""
    waits, timer = [], Timers()
    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: time.sleep(0.05) or waits.append(None))
    for name in ("gen", "update_actor", "update_weights"):
        with timer(name):
            pass
    assert len(waits) == 1 and timer.seconds["update_actor"] >= 0.05
