"""The ranks of a planned job, and accelerators by name, with the numbers of their makers' data sheets: a plan uses these unless
a finished run has measured some.

A device is what torch counts: each of the two dies of an Ascend 910C. Peaks are dense bf16. Links are per device and direction.
The network between nodes is the least certain number: it assumes the common one adapter of 400 Gb/s (H) or 200 Gb/s (others) a
device.
"""

from dataclasses import dataclass

from rl.errors import UserError


@dataclass(frozen=True)
class Device:
    name: str
    kind: str  # cuda or npu
    memory: float  # bytes
    flops: float  # FLOP/s
    bandwidth: float  # of its memory, bytes/s
    link: float  # to the devices of its node, bytes/s
    network: float  # to other nodes, bytes/s


DEVICES = {
    device.name: device
    for device in (
        Device("H200-141GB", "cuda", 141e9, 989e12, 4.8e12, 450e9, 50e9),  # nvidia.com, H200 data sheet
        Device("H100-80GB", "cuda", 80e9, 989e12, 3.35e12, 450e9, 50e9),  # nvidia.com, H100 data sheet, SXM5
        Device("H800-80GB", "cuda", 80e9, 989e12, 3.35e12, 200e9, 50e9),  # the H100 with 400 GB/s of NVLink
        Device("H20-96GB", "cuda", 96e9, 148e12, 4.0e12, 450e9, 50e9),  # NVIDIA's figures as server makers give them
        Device("A100-80GB", "cuda", 80e9, 312e12, 2.039e12, 300e9, 25e9),  # nvidia.com, A100 data sheet, SXM4
        Device("A100-40GB", "cuda", 40e9, 312e12, 1.555e12, 300e9, 25e9),
        Device("A800-80GB", "cuda", 80e9, 312e12, 2.039e12, 200e9, 25e9),  # the A100 with 400 GB/s of NVLink
        Device("L40S-48GB", "cuda", 48e9, 362e12, 0.864e12, 32e9, 25e9),  # nvidia.com, L40S data sheet; PCIe 4
        Device("910B-64GB", "npu", 64e9, 354e12, 1.6e12, 196e9, 25e9),  # Atlas 800T A2: HCCS of 392 GB/s both ways
        Device("910C-64GB", "npu", 64e9, 376e12, 1.6e12, 196e9, 25e9),  # Atlas 800T A3, one of a chip's two dies: 2506.12708
        Device("RTX4090-24GB", "cuda", 24e9, 165e12, 1.008e12, 32e9, 12.5e9),  # nvidia.com, Ada architecture; PCIe 4
        Device("L4-24GB", "cuda", 24e9, 121e12, 0.3e12, 32e9, 12.5e9),  # nvidia.com, L4 data sheet; PCIe 4
    )
}


def device(name: str) -> Device:
    """Return the device whose name is given, or is the only one that begins so. Raise UserError for any other name."""
    found = [d for known, d in DEVICES.items() if name.lower() in (known.lower(), known.lower().partition("-")[0])]
    if len(found) != 1:
        raise UserError(f"--device {name}: choose one of {', '.join(DEVICES)}, or add yours to tools/plan/devices.py.")
    return found[0]


@dataclass(frozen=True)
class Roles:
    """Ranks of the whole job, by role."""

    engines: int
    learners: int
    per_engine: int = 1  # ranks that share an engine (--rollout-tp)
    colocated: bool = False  # the same ranks generate and learn, in turn (train_sync.py)


@dataclass(frozen=True)
class Machine:
    """The nodes of a job, all alike."""

    nodes: int
    per_node: int  # ranks

    def split(self, generators: int, per_engine: int) -> Roles:
        """generators: of each node. Raise UserError if a role gets no rank, or an engine fewer than it needs."""
        if not 0 < generators < self.per_node or generators % per_engine:
            raise UserError(
                f"--generators {generators} of {self.per_node} ranks a node: both roles need a rank, and --rollout-tp "
                f"{per_engine} must divide the generators."
            )
        return Roles(self.nodes * generators // per_engine, self.nodes * (self.per_node - generators), per_engine)
