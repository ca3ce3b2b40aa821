"""CPU, CUDA and NPU run the same code: rl/ranks/device.py and device_groups.py alone tell them apart. Part of .ci/prose.py."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ALONE = ("rl/ranks/device.py", "rl/ranks/device_groups.py")
DEVICES = {"cpu", "cuda", "npu"}
BACKENDS = {"gloo", "nccl", "hccl"}
QUESTIONS = {"is_cpu", "is_cuda", "is_npu"}  # a tensor's own


def strings(node: ast.AST) -> set[str]:
    """The constant strings within an expression, cut at the signs of "cpu:gloo,cuda:nccl" and "cuda:0"."""
    found = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {word for text in found for part in text.split(",") for word in part.split(":")}


def tells_apart(node: ast.AST) -> bool:
    """Return whether this code asks for the kind of a device, or names a feature of one kind."""
    match node:
        case ast.Compare() | ast.MatchValue():  # device.type == "cuda", kind in ("cuda", "npu"), case "cuda":
            return bool(strings(node) & DEVICES)
        case ast.Dict(keys=keys):  # {"cpu": ..., "cuda": ...}[device.type]
            return len(keys) > 1 and all(key and strings(key) & DEVICES for key in keys)
        case ast.Call(func=ast.Attribute(attr="startswith" | "endswith"), args=arguments):
            return any(strings(argument) & DEVICES for argument in arguments)
        case ast.Call(func=ast.Attribute(attr="cuda" | "npu")):  # tensor.cuda()
            return True
        case ast.Call(args=arguments, keywords=keywords):  # new_group(backend="gloo")
            given = [*arguments, *(keyword.value for keyword in keywords)]
            return any(isinstance(argument, ast.Constant) and strings(argument) & BACKENDS for argument in given)
        case ast.Attribute(value=ast.Name(id="torch"), attr="cuda" | "npu" | "mps" | "xpu"):
            return True
        case ast.Attribute(attr=name):
            return name in QUESTIONS or name.startswith(("ProcessGroupNCCL", "ProcessGroupGloo"))
        case ast.Import(names=names):
            return any(is_of_one_kind(name.name) for name in names)
        case ast.ImportFrom(module=module, names=names):
            return any(is_of_one_kind(f"{module}.{name.name}") for name in names)
    return False


def is_of_one_kind(module: str) -> bool:
    return module.startswith(("torch_npu", "torch.cuda", "torch.npu"))


# The first ones name the kinds, before torch is there
MAY = ("doctor.py", "tools/doctor/facts.py", "tools/doctor/packages.py", "rl/ranks/host.py")
MAY += ("losses.py",)  # which stands alone: it looks at values only where nothing has to wait for a device


def lines(source: str) -> list[int]:
    return sorted({node.lineno for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno") and tells_apart(node)})


def told_apart() -> Iterator[str]:
    """Yield a line for each place in other files. Those that may have them are named, so that the search is seen to work."""
    for file in (*ROOT.glob("*.py"), *ROOT.glob("rl/**/*.py"), *ROOT.glob("tools/**/*.py")):
        name = str(file.relative_to(ROOT))
        found = lines(file.read_text())
        if name not in (*ALONE, *MAY):
            yield from (f"{name}:{line}: which kind of device it is, is a question to {ALONE[0]}" for line in found)
        elif not found:
            yield f"{name}: tells no devices apart: .ci/devices.py need not name it"
