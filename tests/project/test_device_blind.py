"""CPU, CUDA and NPU run the same code: rl/ranks/device.py and device_groups.py alone tell them apart."""

import ast

import pytest
from helpers import ROOT

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


MAY = (
    "doctor.py",
    "tools/doctor/facts.py",
    "tools/doctor/packages.py",
    "rl/ranks/host.py",
)  # name the kinds, before torch is there
MAY += ("losses.py",)  # which stands alone: it looks at values only where nothing has to wait for a device


def lines(source: str) -> list[int]:
    return sorted({node.lineno for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno") and tells_apart(node)})


def test_one_file_alone_tells_devices_apart():
    sources = [*ROOT.glob("*.py"), *(ROOT / "rl").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    assert len(sources) > 30
    found = {str(path.relative_to(ROOT)): lines(path.read_text()) for path in sources}
    for name in (*ALONE, *MAY):
        assert found.pop(name)
    assert {name: where for name, where in found.items() if where} == {}


@pytest.mark.parametrize(
    ("line", "is_found"),
    {
        "from torch import cuda": True,
        "x = torch.cuda.device_count()": True,
        "pinned = device.type != 'cpu'": True,
        "if x.device.type in ('cuda', 'npu'): pass": True,
        "match kind:\n    case 'cuda': pass": True,
        "backend = {'cpu': 'gloo', 'cuda': 'nccl'}[kind]": True,
        "init_process_group('cpu:gloo,cuda:nccl')": True,
        "torch.accelerator.synchronize()": False,
        "place = torch.empty(3, device='cpu')": False,
    }.items(),
)
def test_the_search_finds_what_it_looks_for(line, is_found):
    assert bool(lines(line)) is is_found
