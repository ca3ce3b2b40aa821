"""Checks of models with gated delta nets in vLLM that test_engine_vllm_hybrid.py runs, like vllm_checks.py."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generation"))

from test_engine import PROMPTS, changed, drain, mixed_reference, reference_log_probs, requests_for
from vllm_checks import main, start, wrongly_loaded
from vllm_image_checks import Case, log_probs
from vllm_image_checks import changed as moved

from rl.generation.engine import EngineArgs
from rl.generation.vllm.engine import VLLMEngine

FP32 = ("A_log", "dt_bias", "linear_attn.norm.weight")


def mean_error(outputs, reference) -> float:
    """The mean difference between the outputs' log-probs and reference(prompt, output)."""
    gaps = [(torch.tensor(o.log_probs) - reference(PROMPTS[i], o)).abs() for (i, *_), o in outputs.items()]
    return float(torch.cat(gaps).mean())


def of(model):
    return lambda prompt, output: reference_log_probs(model, prompt, output.token_ids, 1.0)


def in_bfloat16(model):
    """The weights as the engine is sent them, computed with in fp32."""
    for name, parameter in model.named_parameters():
        if not name.endswith(FP32):
            parameter.data = parameter.data.bfloat16().float()
    return model


def hybrid(path: str) -> dict:
    """Log-probs before and after an update, the weights read back, swaps in flight, and responses that continue elsewhere."""
    engine, old, new = start(path, torch.bfloat16), AutoModelForCausalLM.from_pretrained(path), changed(path)
    in_bfloat16(old), in_bfloat16(new)
    cache = engine.engine.vllm_config.cache_config
    out = {"states": cache.mamba_ssm_cache_dtype, "shares prefixes": cache.enable_prefix_caching}
    out |= {"before": mean_error(drain(engine, requests_for()), of(old))}
    engine.update(new.named_parameters(), version=1)
    outputs = drain(engine, requests_for())
    out |= {"after": mean_error(outputs, of(new)), "wrong": wrongly_loaded(engine, new)}
    sent = {name: parameter.data for name, parameter in new.named_parameters()}
    held = {name: engine.read_back(name).float() for name in sent}
    out["not its part"] = [name for name in sent if not torch.equal(engine.own_part(name, sent[name]), held[name])]
    names = [name for name in sent if name.endswith(FP32)]
    out["precision"] = {name.partition("linear_attn.")[2]: str(engine.read_back(name).dtype) for name in names}
    out["old weights"] = mean_error(outputs, of(old))
    for how in ("kept", "recomputed"):
        out[how] = swapped(engine, old, new, how)
    engine.update(old.named_parameters(), version=2)
    for request in requests_for(n=1, ignore_eos=True):
        engine.add(request)
    for _ in range(8):
        engine.step()
    so_far = {output.id: output for output in engine.unfinished()}
    engine.abort()
    again = [dataclasses.replace(r, so_far=so_far[r.id]) for r in requests_for(n=1, ignore_eos=True)]
    out["resumed"] = mean_error(drain(engine, again), of(old))
    return out


def images(path: str) -> dict:
    """The same of a model with images, for one update of its tower and its text."""
    case = Case(path)
    engine = VLLMEngine(path, EngineArgs(max_num_seqs=6, max_num_batched_tokens=2048), 300, torch.bfloat16)
    old, new = in_bfloat16(case.model), in_bfloat16(moved(case.model, "both", 1))

    def mean_of(outputs, model) -> float:
        gaps = [torch.tensor(o.log_probs) - log_probs(model, case.prompts[i], o.token_ids) for (i, *_), o in outputs.items()]
        return float(torch.cat(gaps).abs().mean())

    out = {"before": mean_of(drain(engine, case.requests(ignore_eos=True)), old)}
    engine.update(new.named_parameters(), version=1)
    outputs = drain(engine, case.requests(ignore_eos=True))
    return out | {"after": mean_of(outputs, new), "old weights": mean_of(outputs, old), "wrong": wrongly_loaded(engine, new)}


def swapped(engine, old, new, how: str) -> dict:
    """The mean error behind a swap of the weights, against a model whose states were kept, and one with them recomputed."""
    engine.update(old.named_parameters(), version=0)
    for request in requests_for(n=2, ignore_eos=True):
        engine.add(request)
    for _ in range(6):
        engine.step()
    engine.update(new.named_parameters(), version=1, recompute_kv=how == "recomputed")
    outputs, found = drain(engine, []), {"kept": [], "recomputed": []}
    for (i, *_), output in outputs.items():
        first = sum(version == 0 for version in output.versions)
        before, after = output.token_ids[:first], output.token_ids[first:]
        got = torch.tensor(output.log_probs[first:])
        found["kept"].append((got - mixed_reference(old, new, PROMPTS[i] + before, after)).abs())
        found["recomputed"].append((got - reference_log_probs(new, PROMPTS[i] + before, after, 1.0)).abs())
    return {name: float(torch.cat(gaps).mean()) for name, gaps in found.items()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), globals())
