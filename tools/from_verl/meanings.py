"""The meaning of verl's values, where our flag takes more than the same number under another name.

Each function takes the Run and returns flags with their values, None to leave one out; it tells the Run what has no equivalent.
"""

import json

from tools.from_verl.verl_run import ASYNC, SYNC, Run, data, listed

DTYPE = "A.actor.fsdp_config.dtype"
PRECISIONS = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
MEGATRON_LAYERS = data("words.yaml")["megatron_layers"]
LOGGERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")


# -- data


def chat_template(run: Run) -> dict[str, object]:
    head = "data.apply_chat_template_kwargs"
    given = run[head] or {}
    if not isinstance(given, dict):
        run.lacks(head, "it is no mapping of arguments")
        given = {}
    given = dict(given)
    given |= {key.removeprefix(f"{head}."): value for key, value in run.given.items() if key.startswith(f"{head}.")}
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()]
    return {"--chat-template-args": words}


def batch(run: Run) -> dict[str, object]:
    mini = {"--ppo-mini-batch-size": run["A.actor.ppo_mini_batch_size"]}
    if run.script != ASYNC:
        size = run["data.train_batch_size"]
        run.skips("async_training.require_batches", f"{run.script} has one batch a step")
        engines = run["trainer.nnodes"] * run["trainer.n_gpus_per_node"] // max(1, run["A.rollout.tensor_model_parallel_size"])
        if run.script == SYNC and size < engines:
            run.note(
                f"train_batch_size {size} gives {size} of the {engines} engines a prompt in a step, and the others wait: all "
                "responses to a prompt come from one engine. Fewer ranks cost no time, more prompts use all."
            )
        return {"--train-batch-size": size} | mini
    run.skips("data.train_batch_size", "a step is require_batches mini-batches, as in verl's fully async mode, which wants 0")
    return {"--train-batch-size": run.prompts_a_step} | (mini if run["async_training.require_batches"] > 1 else {})


# -- model and learner


def turns(run: Run) -> dict[str, object]:
    """Both only matter with several turns."""
    if not run["A.rollout.multi_turn.enable"]:
        return {}
    key = "A.rollout.multi_turn.format"
    form = {"hermes": "hermes", "llama3_json": "llama", "qwen3_coder": "xml"}.get(str(run[key]))
    if form is None:
        run.lacks(key, "only hermes, llama3_json and qwen3_coder")
    return {"--max-turns": run["A.rollout.multi_turn.max_assistant_turns"], "--tool-format": form}


def warmup(run: Run) -> dict[str, object]:
    steps = run["A.actor.optim.lr_warmup_steps"]
    key = "A.actor.optim.lr_warmup_steps_ratio"
    ratio = run[key] or 0
    if steps is None or steps < 0:
        if ratio and run.steps is None:
            why = f"the number of steps follows from the data: set --lr-warmup-steps to {ratio} times the run's steps"
            run.lacks(key, why)
            if not run.has(key):
                run.note(f"verl warms up over {ratio} of the steps by default; {why}.")
            return {}
        steps = int(ratio * (run.steps or 0))
    if steps > 0 and run["A.actor.optim.zero_indexed_step"] is not False:
        run.note(
            f"warm-up: --lr-warmup-steps {steps} begins at 1/{steps} of --lr; verl's first training step has the rate 0, and "
            f"its other steps of the warm-up are one step behind. From step {steps + 1} on both are the same."
        )
    return {"--lr-warmup-steps": steps}


def scheduler(run: Run) -> dict[str, object]:
    word = run["A.actor.optim.lr_scheduler_type"] or "constant"
    if word not in ("constant", "cosine"):
        run.lacks("A.actor.optim.lr_scheduler_type", "only constant and cosine")
        word = "constant"
    if word == "constant":
        of = "A.actor.optim."
        run.skips(
            " ".join(of + key for key in ("min_lr_ratio", "min_lr", "num_cycles", "lr_decay_steps")), "the rate is constant"
        )
    return {"--lr-scheduler-type": word}


def betas(run: Run) -> dict[str, object]:
    pair = listed(run["A.actor.optim.betas"])
    if len(pair) != 2:
        run.lacks("A.actor.optim.betas", "expected two numbers, such as [0.9,0.999]")
        return {}
    if pair[0] != 0.9:
        run.lacks("A.actor.optim.betas", "the first is always 0.9")
    return {"--adam-beta2": pair[1]}


def token_budget(run: Run) -> dict[str, object]:
    of = "A.actor."
    shared_by = max(1, run["A.actor.ulysses_sequence_parallel_size"])
    if run[of + "use_dynamic_bsz"]:
        tokens = run[of + "ppo_max_token_len_per_gpu"]
    else:
        sequences = run[of + "ppo_micro_batch_size_per_gpu"] or run[of + "ppo_micro_batch_size"]
        if not sequences:
            return {}
        tokens = -(-sequences * run.full_length // shared_by)
    least = -(-run.full_length // shared_by)
    if tokens < least:
        run.note(f"A micro-batch takes at least one sequence: {least} tokens a device, where verl's takes {tokens}.")
    return {"--max-tokens-per-micro-batch": max(tokens, least)}


# -- what the learners hold


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


# -- reward


def own_reward(run: Run) -> dict[str, object]:
    path, name = run["reward.custom_reward_function.path"], run["reward.custom_reward_function.name"]
    return {"--reward": f"{path}:{name}" if path else None}


def overlong(run: Run) -> dict[str, object]:
    of = "reward.reward_kwargs.overlong_buffer_cfg."
    if run["reward.reward_manager.name"] != "dapo":
        run.lacks(of + "enable", "verl itself only penalises long responses with reward_manager=dapo")
        return {}
    budget = run["reward.reward_kwargs.max_resp_len"]
    if budget not in (None, run["data.max_response_length"]):
        run.lacks("reward.reward_kwargs.max_resp_len", "the penalty ends at --max-response-length")
    return {"--overlong-buffer-len": run[of + "len"], "--overlong-penalty-factor": run[of + "penalty_factor"]}


# -- rollout


def engine(run: Run) -> dict[str, object]:
    if run["A.rollout.name"] != "vllm":
        run.lacks("A.rollout.name", "the engine is vLLM or the embedded one")
    return {"--engine": "vllm"}


def validation(run: Run) -> dict[str, object]:
    of = "A.rollout.val_kwargs."
    if run[of + "top_k"] not in (None, -1, 0):
        run.lacks(of + "top_k", "the validation samples without top-k")
    if run.has(of + "do_sample") and not run[of + "do_sample"]:
        return {"--val-temperature": 0, "--val-top-p": 1.0}
    return {"--val-temperature": run[of + "temperature"], "--val-top-p": run[of + "top_p"]}


def gpu_memory(run: Run) -> dict[str, object]:
    alone = run["A.rollout.standalone_gpu_memory_utilization"]
    counts = run.script == ASYNC and isinstance(alone, int | float)
    return {"--gpu-memory-utilization": alone if counts else run["A.rollout.gpu_memory_utilization"]}


def rollout_dtype(run: Run) -> dict[str, object]:
    ours = PRECISIONS.get(run["A.rollout.dtype"])
    if ours is None:
        run.lacks("A.rollout.dtype", "only bfloat16 and float32")
    return {"--rollout-dtype": "auto" if ours in (None, PRECISIONS.get(run[DTYPE])) else ours}


# -- trainer


def length(run: Run) -> dict[str, object]:
    epochs, steps = run["trainer.total_epochs"], run["trainer.total_training_steps"]
    if run.script == ASYNC and not run.is_v1:
        run.skips("trainer.total_training_steps", "verl's fully async mode goes by total_rollout_steps and epochs")
        return {"--total-epochs": epochs, "--total-rollout-steps": run["rollout.total_rollout_steps"]}
    if run["rollout.total_rollout_steps"] is not None:
        run.lacks("rollout.total_rollout_steps", "verl itself only reads it in its fully async mode")
    if steps is None:
        return {"--total-epochs": epochs}
    if run.has("trainer.total_epochs"):
        run.note(
            f"total_training_steps {steps} decides, and total_epochs {epochs} is left out: verl would stop earlier if {epochs} "
            f"passes over the data are fewer than {steps} steps."
        )
    return {"--total-training-steps": run.steps}


def _every(run: Run, key: str) -> int:
    """A frequency in steps; verl's asynchronous modes count publishes."""
    every = run[key]
    if every is None or every <= 0:
        return 0
    return every * run["async_training.trigger_parameter_sync_step"] if run.script == ASYNC else every


def test_freq(run: Run) -> dict[str, object]:
    return {"--test-freq": _every(run, "trainer.test_freq")}


def save_freq(run: Run) -> dict[str, object]:
    return {"--save-freq": _every(run, "trainer.save_freq")}


def keep(run: Run) -> dict[str, object]:
    if not _every(run, "trainer.save_freq"):
        run.skips("trainer.max_actor_ckpt_to_keep", "there is one checkpoint, at the end")
        return {}
    return {"--max-ckpt-to-keep": max(0, run["trainer.max_actor_ckpt_to_keep"] or 0)}


def resume(run: Run) -> dict[str, object]:
    mode = run["trainer.resume_mode"]
    if mode == "resume_path":
        run.lacks(
            "trainer.resume_from_path", "verl's checkpoints cannot be read; start from its Hugging Face export with --model"
        )
    return {"--resume-mode": "disable" if mode == "disable" else "auto"}


def logger(run: Run) -> dict[str, object]:
    names = listed(run["trainer.logger"])
    if unknown := [name for name in names if name not in LOGGERS]:
        run.lacks("trainer.logger", f"{', '.join(map(str, unknown))}; here {', '.join(LOGGERS)}")
    return {"--logger": [name for name in names if name in LOGGERS]}


# -- supervised training


def sft_columns(run: Run) -> dict[str, object]:
    if run["data.multiturn.enable"] is not False:
        return {"--messages-key": run["data.messages_key"]}
    nested = [key for key in ("data.prompt_dict_keys", "data.response_dict_keys") if run[key]]
    for key in nested:
        run.lacks(key, "columns within a column are not read")
    if nested:
        run.gaps.append(
            f"the text is within the columns {run['data.prompt_key']} and {run['data.response_key']} ({', '.join(nested)}): "
            "write a column `messages`, and leave out --prompt-key and --response-key."
        )
    else:
        run.note(
            "verl's fsdp_sft_trainer puts the prompt into the chat template. A prompt that is a string is used as it is here: "
            "write chat messages, or a column `messages`."
        )
    return {"--prompt-key": run["data.prompt_key"], "--response-key": run["data.response_key"]}


def sft_truncation(run: Run) -> dict[str, object]:
    if run["data.truncation"] == "error":
        return {"--filter-overlong-prompts": False}
    run.lacks("data.truncation", "conversations are not cut: --filter-overlong-prompts leaves out those that are too long")
    return {"--filter-overlong-prompts": True}


def sft_test_freq(run: Run) -> dict[str, object]:
    every = max(0, run["trainer.test_freq"])
    if not every and run["data.val_files"]:
        run.note("verl also validates after its last step, whatever test_freq says: --test-freq above all steps does that.")
        every = run.steps or 10**6
    return {"--test-freq": every}
