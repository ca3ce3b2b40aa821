"""The meaning of verl's keys for the precision and place of what the learners hold (see meanings.py)."""

from tools.from_verl.verl_run import Run, listed

PRECISIONS = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
DTYPE = "A.actor.fsdp_config.dtype"


def offload(run: Run) -> dict[str, object]:
    of, cpu_adam = "A.actor.fsdp_config.", "A.actor.optim.override_optimizer_config."
    policy = bool(run[of + "offload_policy"])
    parameters = bool(run[of + "param_offload"] or run["A.actor.megatron.grad_offload"])
    fraction = (run[cpu_adam + "optimizer_offload_fraction"] or 0) if run[cpu_adam + "optimizer_cpu_offload"] else 0
    moments = bool(run[of + "optimizer_offload"] or fraction)
    if policy or parameters:
        if not policy and not moments:
            run.note("verl offloads the parameters without the optimizer state; --param-offload offloads both.")
        return {"--param-offload": True}
    if 0 < fraction < 1:
        run.note(f"verl offloads {fraction} of the optimizer state; --optimizer-offload offloads all of its moments.")
    return {"--param-offload": False, "--optimizer-offload": moments}


MEGATRON_LAYERS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_q": ["q_proj"], "linear_k": ["k_proj"], "linear_v": ["v_proj"],
    "linear_proj": ["o_proj"], "linear_fc1": ["gate_proj", "up_proj"], "linear_fc1_gate": ["gate_proj"],
    "linear_fc1_up": ["up_proj"], "linear_fc2": ["down_proj"],
}  # fmt: skip


def adapters(run: Run) -> dict[str, object]:
    fsdp = ("A.model.lora_alpha", "A.model.target_modules", "A.model.lora_adapter_path")
    megatron = tuple(f"A.model.lora.{key}" for key in ("alpha", "target_modules", "adapter_path", "type"))
    rank = run["A.model.lora_rank"] or run["A.model.lora.rank"]
    own, other = (fsdp, megatron) if run["A.model.lora_rank"] or not rank else (megatron, fsdp)
    run.skips(" ".join(other if rank else own + other), "there are adapters by another key" if rank else "lora_rank is 0")
    if not rank:
        return {}
    alpha, target, path = own[:3]
    layers = _layers_of_megatron(run, target) if own is megatron else _layers(run, target)
    flags = {"--lora-rank": rank, "--lora-alpha": run[alpha], "--lora-target": layers}
    if run[path] is not None:
        run.lacks(path, "merge the adapter into the model with peft, and train that")
    return flags


def _layers(run: Run, key: str) -> list | None:
    """Return the layers that are named one by one; None for all."""
    target = run[key]
    if isinstance(target, list):
        return target
    if target != "all-linear":
        run.lacks(key, "layers are named one by one, not by an expression")
    return None


def _layers_of_megatron(run: Run, key: str) -> list[str] | None:
    """Return Hugging Face's names of the layers; None for all of the decoder, which Megatron's default names."""
    if run["A.model.lora.type"] not in ("lora", "canonical_lora"):
        run.lacks("A.model.lora.type", "only lora and canonical_lora")
    named = listed(run[key])
    if unknown := [name for name in named if name not in MEGATRON_LAYERS]:
        run.lacks(key, f"{', '.join(map(str, unknown))}; all linear layers of the decoder have adapters")
        return None
    if "linear_qkv" in named or "linear_fc1" in named:
        run.note(
            "Megatron has one adapter for queries, keys and values together (linear_qkv), one for gate and up (linear_fc1); "
            "here each of these layers has its own."
        )
    layers = [layer for name in named for layer in MEGATRON_LAYERS[name]]
    return None if {*layers} == {layer for of in MEGATRON_LAYERS.values() for layer in of} else layers
