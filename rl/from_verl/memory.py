"""The meaning of verl's keys for the precision and place of what the learners hold (see meanings.py)."""

from rl.from_verl.verl_run import Run

PRECISIONS = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
DTYPE, REDUCE = "A.actor.fsdp_config.dtype", "A.actor.fsdp_config.mixed_precision.reduce_dtype"


def dtype(run: Run) -> dict[str, object]:
    ours = PRECISIONS.get(run[DTYPE])
    if ours is None:
        run.lacks(DTYPE, "only bfloat16 and float32")
    return {"--dtype": ours}


def grad_dtype(run: Run) -> dict[str, object]:
    ours = PRECISIONS.get(run[REDUCE])
    if ours is None:
        run.lacks(REDUCE, "only bfloat16 and float32")
    if ours == "bfloat16":
        run.note("verl reduces gradients in bf16 and keeps them in fp32; --grad-dtype bfloat16 keeps them in bf16, too.")
    return {"--grad-dtype": ours}


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


def ref_offload(run: Run) -> dict[str, object]:
    of = "A.ref.fsdp_config."
    if run.needs_reference:
        return {"--ref-offload": bool(run[of + "param_offload"] or run[of + "offload_policy"])}
    run.skips(f"{of}param_offload {of}offload_policy", "without a KL term there is no reference policy")
    return {}


def activation_offload(run: Run) -> dict[str, object]:
    asked = bool(run["A.model.enable_activation_offload"])
    if asked and not run["A.model.enable_gradient_checkpointing"]:
        run.lacks("A.model.enable_activation_offload", "only with gradient checkpointing")
        asked = False
    return {"--activation-offload": asked}


def optimizer(run: Run) -> dict[str, object]:
    name = str(run["A.actor.optim.optimizer"])
    ours = {"adamw": "adamw", "adamw8bit": "adamw_8bit", "_adamw": "adamw"}.get(name.lower())
    if ours is None:
        run.lacks("A.actor.optim.optimizer", f"{name}; here only AdamW and AdamW8bit")
    return {"--optim": ours}


def adapters(run: Run) -> dict[str, object]:
    of = "A.model."
    if not run[of + "lora_rank"]:
        run.skips(f"{of}lora_alpha {of}target_modules {of}lora_adapter_path", "it only matters with lora_rank")
        return {}
    target = run[of + "target_modules"]
    named = None
    if isinstance(target, list):
        named = target
    elif target != "all-linear":
        run.lacks(of + "target_modules", "layers are named one by one, not by an expression")
    flags = {"--lora-rank": run[of + "lora_rank"], "--lora-alpha": run[of + "lora_alpha"]}
    return flags | {"--lora-target": named, "--lora-model": run[of + "lora_adapter_path"]}
