"""Which device each rank of a node has, and the process groups that carry weights. As device.py it tells kinds apart."""

import os
import platform
from datetime import timedelta

import torch
import torch.distributed as dist

from rl.errors import UserError
from rl.ranks import device as devices
from rl.ranks.device import HOST, is_accelerator

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}  # a process's devices, by number or name


def check_own(store: dist.Store, members: range, rank: int, device: torch.device, role: str) -> None:
    """Raise UserError if ranks of one role on this node share a device, since their collectives need one each. members: all
    ranks of that role on this node. Collective."""
    if not is_accelerator(device):
        return
    store.set(f"device/of/{rank}", _number_in_node(device))
    count = len(set(store.multi_get([f"device/of/{member}" for member in members])))
    if count < len(members):
        raise UserError(
            f"{platform.node()} has {len(members)} {role}s and {count} {devices.kind()} device(s) for them, and each {role} "
            f"needs one of its own. Start at most {count} here (--nproc-per-node, --generators), or set RL_DEVICE=cpu. A "
            "generator and a learner may share one."
        )


def _number_in_node(device: torch.device) -> str:
    """Return a name of the device that is unique on this machine: ranks that see one device each all call it number 0."""
    uuid = getattr(devices.module().get_device_properties(device), "uuid", None) if is_accelerator(device) else None
    visible = os.environ.get(VISIBLE.get(device.type, ""), "").split(",")
    index = device.index or 0
    return str(uuid or (visible[index] if index < len(visible) and visible[index] else index))


def device_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta):
    """Return a new group that sends device memory directly; None if members share a device or use the host. Collective."""
    store.set(f"device/{rank}", f"{platform.node()}/{device.type}/{_number_in_node(device)}")
    if rank == 0:  # only one rank asks for all: if each asked for all, 512 ranks would make a quarter of a million calls
        names = store.multi_get([f"device/{i}" for i in range(size)])
        on_host = any(f"/{HOST}/".encode() in name for name in names)
        store.set("device/own", str(int(len(set(names)) == size and not on_host)))
    if store.get("device/own") != b"1" or not is_accelerator(device):
        return None
    if device.type == "npu":
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        group = ProcessGroupHCCL(store, rank, size, timeout=timeout)
        # Members connect at their first message, within HCCL_CONNECT_TIMEOUT (two minutes): do it now, not at the first weights
        group.broadcast([torch.zeros(1, device=device)], dist.BroadcastOptions()).wait()
        return group
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def host_group(store: dist.Store, rank: int, size: int, timeout: timedelta, at_once: int = 2):
    """Return a new group that sends host memory. timeout: for all members to join, and for each collective. at_once: the most
    collectives under way at a time; gloo lets the others wait. Collective."""
    gloo = dist.ProcessGroupGloo
    networks = os.environ.get("GLOO_SOCKET_IFNAME")
    options = gloo._Options()
    options._timeout, options._threads = timeout, at_once
    names = networks.split(",") if networks else []
    store.set_timeout(timeout)  # gloo waits for the members as long as the store does
    options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    return gloo(store, rank, size, options)
