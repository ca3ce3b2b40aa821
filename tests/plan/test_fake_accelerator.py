"""An accelerator on a machine without one: our own code runs on a fake device that knows shapes, precisions and devices, but
no values.

A tensor that is left on the host must fail here. To show it, each place of our code that puts something on the device is taken
out in turn (tests/tools/mutants.py), and the cases below must notice.
"""

import json
import re

import pytest
from helpers import ROOT, run_script
from mutants import places
from tiny_vlm import save_vlm

PROGRAM = "tests/programs/fake_accelerator.py"
CASES = ["many ranks", "offload", "compact", "without advantage", "engine", "what an NPU lacks", "what CUDA lacks"]
SLOW = ["one rank", "one update", "experts", "a rank without work", "chunks", "moments on the host"]
SLOW += ["one rank, over the host", "engine, over the host", "engine, overlapped"]
SLOW += ["what could be sampled"]
SLOW += ["experts, bf16", "engine, CUDA's attention", "engine, experts", "experts, replayed", "shared sequences"]
SLOW += ["shared sequences, CUDA's attention", "shared experts", "shared experts and sequences", "images", "images, windows"]
SLOW += ["delta nets", "engine, delta nets", "adapters", "a teacher's tokens", "a critic", "demonstrations"]
SLOW += ["images, shared sequences", "in turns", "in turns, images"]
SLOW += ["images, a frozen tower", "images, experts", "engine, images", "engine, images, windows", "a teacher's prompts"]
NOTICED_BY = {  # a file whose places are taken out -> the cases that must notice
    "rl/learning/learner.py": ["one rank", "one update", "what could be sampled"],
    "rl/learning/placement.py": ["one rank", "one update"],
    "rl/algorithm/whole_batch.py": ["one rank", "one update"],
    "rl/model/loading.py": ["one rank"],
    "rl/learning/micro_batches.py": ["one rank", "a rank without work", "what could be sampled"],
    "rl/learning/batch_images.py": ["images, a frozen tower"],
    "rl/model/attention.py": ["offload", "engine", "one rank"],
    "rl/model/attention_kernels.py": ["one rank", "many ranks"],
    "rl/model/log_probs.py": ["chunks", "a teacher's tokens"],
    "rl/learning/compact_adamw.py": ["compact", "moments on the host"],
    "rl/model/vision_forward.py": ["images"],
    "rl/model/router.py": ["experts, replayed"],
    "rl/model/expert_parallel.py": ["shared experts"],
    "rl/model/shards.py": ["many ranks", "offload"],
    "rl/generation/embedded/engine.py": ["engine", "engine, images"],
    "rl/generation/embedded/kv_cache.py": ["engine"],
    "rl/generation/embedded/decoding.py": ["engine"],
    "rl/generation/embedded/states.py": ["engine, delta nets"],
    "rl/model/hybrid/chain.py": ["delta nets", "engine, delta nets"],
    "rl/model/hybrid/rule.py": ["delta nets"],
    "rl/weights/publisher.py": ["one rank", "one rank, over the host"],
    "rl/weights/subscriber.py": ["engine", "engine, over the host"],
    "rl/weights/buckets.py": ["one rank", "one rank, over the host", "engine"],
    "rl/generation/generator.py": ["in turns"],
    "rl/learning/optimizer.py": ["one rank"],
    "rl/algorithm/critic.py": ["a critic"],
    "rl/algorithm/imitation.py": ["demonstrations"],
    "rl/algorithm/teacher.py": ["a teacher's prompts"],
}
LEFT_OUT = {  # a file with such places of which no case can notice any -> why
    "rl/ranks/device.py": "it moves what others tell it to",
    "rl/generation/vllm/start.py": "vLLM's own process, tested with vLLM",
    "rl/model/grouped_experts.py": "a kernel with values, tested by itself",
    "rl/model/hybrid/kernels.py": "a kernel with values, tested by itself",
    "rl/model/liger.py": "a kernel with values, tested by itself",
    "rl/generation/vllm/weights.py": "vLLM's own process, tested with vLLM",
    "rl/weights/local.py": "a copy for vLLM",
    "rl/adapters/lora.py": "merging moves each part to where A is, again; the case of adapters looks at what comes out",
}
ALLOWED = {  # what a real device takes from the host as well, by name of the function
    # routes of a pass that are replayed may wait on the device, where they take its memory
    "Router.chosen": "torch.stack",
    # what a teacher has found waits on the host, and might wait on the device
    "Teacher.targets_of": "",
    # moved before or after, or made on the host on purpose
    "Learner.weights": "local",
    # numbers by themselves, at which fake tensors do not look
    "LossMeans.metrics": "torch.stack",
    "_fill_rest": r"known\[name\]",
    # weights that cannot be read in parts, of which no case here has any
    "_from_first": "",
    # an engine with memory of its own
    "Subscriber._arriving": r"data\.to",
    "Subscriber._new": "torch.empty",
    # the host has no kernel to be checked
    "check_kernel": r"x\.to",
    # for a kernel that the fake device does not have
    "Chain._waves": "",
    # indices may lie on the host
    "MicroBatch.of": r"nothing|moved\(predict",
    "PrefillLayout.__init__": "torch.tensor",
    "DecodeLayout.__init__": r"torch.arange\(len",
    "FillingChain.convolved": "",
    "FillingChain.keep": "",
    "TransformersEngine._free": "torch.tensor",
    # so may indices, and what is copied into a slice
    "TransformersEngine._begin": "torch.tensor",
}
MISPLACED = "two devices|same device|device type|incompatible tensor type|AssertionError"
MISPLACED += "|Unsupported data type"  # of a sum that belongs on the host
MISPLACED += "|is not what the learner sent"  # the host and the device take other digests
MISPLACED += (
    "|run_backward .* returned NULL|terminate called"  # a fault that the backward pass meets in a layer loses its words
)
QUICK = [("rl/learning/batch.py", "Tokens.of.here"), ("rl/generation/embedded/kv_cache.py", "KVCache.__init__")]


def mutants() -> list[tuple[str, int, str]]:
    """(file, number, function) of each place that must not be taken out."""
    return [
        (file, number, name)
        for file in NOTICED_BY
        for number, (name, _, text) in enumerate(places(file))
        if not (name in ALLOWED and re.match(ALLOWED[name], text))
    ]


@pytest.fixture(scope="session")
def every_model(models, tmp_path_factory) -> dict[str, str]:
    """All models, including those with images."""
    root = tmp_path_factory.mktemp("vlms")
    return models | {kind: save_vlm(kind, root / kind) for kind in ("qwen3-vl", "qwen3-vl-moe", "qwen2.5-vl")}


def run(models: dict[str, str], cases: list[str], wanted: list[tuple[str, int, str]]) -> dict[str, str]:
    changed = [[file, number, NOTICED_BY[file]] for file, number, _ in wanted]
    what = json.dumps({"models": models, "cases": cases, "mutants": changed})
    done = run_script(PROGRAM, what, timeout=280, env={"RL_DEVICE": ""})  # the fake device is found as a real one is
    return json.loads(done.stdout.splitlines()[-1])


def check(report: dict[str, str], cases: list[str], wanted: list[tuple[str, int, str]]) -> None:
    assert {name: said for name in cases if (said := report.pop(name))} == {}
    assert len(report) == len(wanted)
    assert {name: said for name, said in report.items() if not re.search(MISPLACED, said)} == {}


@pytest.mark.runs
def test_our_code_runs_on_an_accelerator(models):
    wanted = [mutant for mutant in mutants() if (mutant[0], mutant[2]) in QUICK]
    assert len(wanted) == len(QUICK)
    check(run(models, CASES, wanted), CASES, wanted)


@pytest.mark.slow
def test_every_file_that_moves_something_is_run():
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("rl/**/*.py")}
    assert {file for file in files if places(file)} == {*NOTICED_BY, *LEFT_OUT}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_the_rest_of_it(every_model, part):
    cases = SLOW[part::4]
    check(run(every_model, cases, []), cases, [])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_what_is_left_on_the_host_is_noticed(every_model, part):
    files = list(NOTICED_BY)[part::8]  # several a process, whose start takes longer than most cases
    wanted = [mutant for mutant in mutants() if mutant[0] in files]
    assert {file for file, _, _ in wanted} == set(files)
    check(run(every_model, [], wanted), [], wanted)
