"""CPU, CUDA and NPU run the same code: only rl/device.py and the engines may speak to one kind of device."""

import ast

from helpers import ROOT

MAY = {"rl/device.py", "rl/engine.py", "rl/engine_vllm.py", "rl/engine_vllm_weights.py"}
DEVICES = {"cuda", "npu"}


def device_calls(source: str) -> list[int]:
    """Lines that name torch.cuda or torch.npu, import torch_npu, or call .cuda() or .npu(), not in comments or strings."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in DEVICES:
            names_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            lines += [node.lineno] if names_torch else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DEVICES:
            lines.append(node.lineno)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if any(name.split(".")[0] == "torch_npu" or name.startswith(("torch.cuda", "torch.npu")) for name in names):
                lines.append(node.lineno)
    return lines


def test_only_these_files_speak_to_a_kind_of_device():
    sources = [*ROOT.glob("*.py"), *(ROOT / "rl").rglob("*.py")]
    assert len(sources) > 10
    found = {str(p.relative_to(ROOT)): device_calls(p.read_text()) for p in sources}
    assert {name: lines for name, lines in found.items() if lines and name not in MAY} == {}


def test_the_search_finds_what_it_looks_for():
    seen = [
        "import torch_npu",
        "x = torch.cuda.device_count()",
        "x.cuda()",
        "from torch.cuda import Event",
        "torch.npu.synchronize()",
    ]
    assert all(device_calls(line) for line in seen)
    unseen = ["# torch.cuda.x", "'torch.cuda.x'", "device.type == 'cuda'", "torch.accelerator.synchronize()"]
    assert not any(device_calls(line) for line in unseen)
