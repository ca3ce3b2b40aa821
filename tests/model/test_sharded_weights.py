"""Weights are those that transformers reads, and no rank holds the whole model. Its own part of them: test_layouts.py."""

import json
import re
import shutil

import pytest
import tiny_vlm
import torch
from helpers import SMALL, run_script
from safetensors.torch import load_file, save_file
from test_pretrained import shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rl.errors import UserError
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.learning.placement import load_policy
from rl.model.loading import load_weights, open_weights
from rl.model.policy import Policy, check_policy
from rl.model.pretrained import auto_class, load_config

FAMILIES = ["qwen2-tied", "qwen3", "moe", "qwen2.5-vl", "qwen3-vl-moe"]


@pytest.fixture(scope="module")
def families(models, tmp_path_factory) -> dict[str, str]:
    vlms = tmp_path_factory.mktemp("vlms")
    return models | {kind: tiny_vlm.save_vlm(kind, vlms / kind) for kind in FAMILIES if "vl" in kind}


def by_transformers(path) -> torch.nn.Module:
    return auto_class(load_config(str(path))).from_pretrained(path, dtype=torch.float32)


def as_in_memory(path) -> None:
    """Files with transformers' own names instead of the hub's."""
    weights = dict(by_transformers(path).bfloat16().named_parameters())
    save_file({name: weight.detach() for name, weight in weights.items()}, path / "model.safetensors", {"format": "pt"})


def of_the_base_model(path) -> None:
    """Files as other tools save a model without its head: the names lack the prefix `model.`."""
    weights = {name.removeprefix("model."): weight for name, weight in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def halved(dtype: torch.dtype):
    def change(path) -> None:
        weights = load_file(path / "model.safetensors")
        save_file({name: weight.to(dtype) for name, weight in weights.items()}, path / "model.safetensors", {"format": "pt"})

    return change


def mixed(path) -> None:
    """Files in which some tensors, and some parts of one parameter, have other precisions."""
    weights, dtypes = load_file(path / "model.safetensors"), [torch.float32, torch.bfloat16, torch.float16]
    weights = {name: weight.to(dtypes[number % 3]) for number, (name, weight) in enumerate(weights.items())}
    save_file(weights, path / "model.safetensors", {"format": "pt"})


FORMS = [
    *((family, "as saved", lambda path: None) for family in ("qwen3", "qwen2.5-vl")),
    *((family, "bfloat16", halved(torch.bfloat16)) for family in ("qwen2-tied", "moe", "qwen3-vl-moe")),
    ("moe", "float16", halved(torch.float16)),
    *((family, "mixed", mixed) for family in ("qwen2-tied", "moe")),
    ("moe", "as in memory", as_in_memory),
    ("qwen2.5-vl", "as in memory", as_in_memory),
    ("moe", "sharded", shard),
    ("qwen2-tied", "base model", of_the_base_model),
]


@pytest.mark.parametrize(("family", "change"), [form[::2] for form in FORMS], ids=[" ".join(form[:2]) for form in FORMS])
def test_weights_and_buffers_are_those_that_transformers_reads(ranks, families, tmp_path, monkeypatch, family, change):
    """Bit for bit, and in parts, for every form of the files. The run's random numbers are not used."""
    path = tmp_path / "model"
    shutil.copytree(families[family], path)
    change(path)
    expected, dice = by_transformers(path), torch.get_rng_state()
    monkeypatch.setattr("rl.learning.placement.check_policy", lambda *_: None)  # that has tests of its own
    learner = Learner(str(path), LearnerArgs(), ranks, total_steps=1)
    of_engine = dict(load_weights(str(path), torch.float32).named_parameters())
    for name, weight in learner.weights():
        assert weight.dtype == torch.float32 and torch.equal(weight, expected.get_parameter(name)), name
        assert torch.equal(of_engine[name], weight), name
    buffers = dict(learner.policy.model.named_buffers())
    assert buffers and buffers.keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), name
    ours, theirs = (model.generation_config.to_dict() for model in (learner.policy.model, expected))
    assert ours == theirs and torch.equal(torch.get_rng_state(), dice)


NOT_FINITE = r"1 of the [\d,]+ values of {name} in model.safetensors are NaN or infinite"
OF_NO_USE = {  # how a tensor is changed, or what it becomes -> what is said of it
    "NaN": (lambda weights, name: weights[name].view(-1)[3:4].fill_(torch.nan), NOT_FINITE),
    "infinite": (lambda weights, name: weights[name].view(-1)[3:4].fill_(-torch.inf), NOT_FINITE),
    "int8": (torch.int8, "{name} in model.safetensors is I8, no float"),
    "int64": (torch.int64, "{name} in model.safetensors is I64, no float"),
    "truths": (torch.bool, "{name} in model.safetensors is BOOL, no float"),
    "eight bits": (torch.float8_e4m3fn, "{name} in model.safetensors is F8_E4M3, no float"),
    "log-probs that are not finite": (lambda weights, _: [w.fill_(3e38) for w in weights.values()], "differ from .* by nan"),
}


@pytest.mark.parametrize("case", OF_NO_USE)
def test_a_tensor_of_no_use_is_named(models, case, ranks, tmp_path):
    """With the flag that gave the model."""
    change, said = OF_NO_USE[case]
    path = shutil.copytree(models["qwen2-tied"], tmp_path / "model")
    weights, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    if callable(change):
        change(weights, name)
    else:
        weights[name] = weights[name].to(change)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    for role, flag in {"policy": "--model", "teacher": "--teacher", "critic": "--critic-model"}.items():
        whole = f"^{flag} {re.escape(str(path))}: .*{said.format(name=re.escape(name))}"
        with pytest.raises(UserError, match=whole) as refused:
            load_policy(str(path), LearnerArgs(), ranks, role, False)
        assert str(refused.value).count(str(path)) == 1


@pytest.mark.parametrize("family", ["qwen2-tied", "moe", pytest.param("qwen2.5-vl", marks=pytest.mark.slow)])
def test_the_check_at_the_start_holds_a_layer_at_a_time(families, tmp_path, monkeypatch, family):
    """Its result equals that of the whole model in fp32, and it frees its memory at the end."""
    shutil.copytree(families[family], path := tmp_path / "model")
    halved(torch.bfloat16)(path)
    seen, forward = [], Policy.forward

    def recorded(*inputs):
        seen.append(forward(*inputs))
        return seen[-1]

    monkeypatch.setattr(Policy, "forward", recorded)
    check_policy(Policy(load_weights(str(path), torch.float32)), str(path))
    weights, most = open_weights(str(path)), 0
    sizes = {name: parameter.numel() for name, parameter in weights.model.named_parameters()}

    def count(*_) -> None:
        nonlocal most
        most = max(most, sum(parameter.numel() for parameter in weights.model.parameters() if not parameter.is_meta))

    for module in weights.model.modules():
        module.register_forward_pre_hook(count)
    with weights.by_layer():
        check_policy(Policy(weights.model), str(path))
    assert torch.equal(*(log_probs for log_probs, _ in seen))
    in_layers = sum(size for name, size in sizes.items() if "layers." in name or "blocks." in name)
    assert 0 < most < sum(sizes.values()) - 0.45 * in_layers
    assert all(parameter.is_meta for parameter in weights.model.parameters())


@pytest.mark.runs
@pytest.mark.timeout(900)
def test_no_rank_holds_more_than_its_part_and_a_tensor(tmp_path):
    """A mixture of 125M parameters in bf16, its experts apart from each other in the files."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "moe_intermediate_size": 256, "num_experts": 32, "head_dim": 32}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL | sizes | {"num_experts_per_tok": 2}))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(tmp_path)
    # glibc keeps freed tensors below 32 MB for itself: those of a model worth sharding are larger
    ranks, flags, env = 4, json.dumps({"expert_parallel": 2}), {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = run_script("tests/programs/memory.py", tmp_path, flags, ranks=ranks, fresh=True, timeout=800, env=env)
    everyone = json.loads(done.stdout.splitlines()[-1])
    for rank, of in enumerate(everyone):  # bytes a parameter
        share, sent = 4 / ranks, 2 if rank == 0 else 0
        assert of["kept"] < 1.2 * share + 0.3, (rank, everyone)
        pages = 2  # of the weights' files, which are mapped and belong to the system's cache
        assert of["load"] < 1.2 * share + of["tensor"] + pages + 0.3, (rank, everyone)
        under_way = 3.2 if rank == 0 else max(1, 3 / ranks)  # buckets, and a rank's parts of them (rl/ranks/gathering.py)
        assert of["publish"] < sent + under_way * of["bucket"] + 0.3, (rank, everyone)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_that_are_others_on_the_second_node_are_refused_and_missing_ones_are_named(network, demo_model, tmp_path):
    (own := tmp_path / "own").mkdir()  # a different directory on each node
    machines = network(2, own=own)
    copies = [own / f"node{number}" / "model" for number in (1, 2)]
    for copy in copies:
        shutil.copytree(demo_model, copy)
    file = copies[1] / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    flags = ["train_async.py", "--model", own / "model", "--output-dir", tmp_path / "runs", "--total-training-steps", 1]
    flags += ["--train-files", "demo", "--no-val-before-train", "--generators"]
    nodes = [(2, [*flags, 1]), (1, [*flags, 0])]  # engines want the whole model, where they are
    (code, console), _ = machines.start(nodes).wait(250)
    assert code == 1 and f"--model {own}/model: model.safetensors on node2 is not the file that node1 has" in console, console
    file.unlink()
    (code, console), _ = machines.start(nodes).wait(250)
    assert code == 1 and f"--model {own}/model: the weights cannot be read: there is no model.safetensors" in console, console
