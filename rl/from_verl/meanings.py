"""The meaning of verl's values, where our flag takes more than the same number under another name.

Each function takes the Run and returns flags with their values, None to leave one out; it tells the Run what has no equivalent.
"""

from rl.flag_words import CORRECTIONS
from rl.from_verl.memory import DTYPE
from rl.from_verl.verl_run import ASYNC, PRESET, SYNC, Run
from rl.ranges import flag

LOGGERS = ("console", "tensorboard", "wandb")


def listed(value: object) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


# -- data


def files(run: Run) -> dict[str, object]:
    keys = {"--train-files": "data.train_files", "--val-files": "data.val_files"}
    return {flag: listed(run[key]) or None for flag, key in keys.items()}


def batch(run: Run) -> dict[str, object]:
    mini = {"--ppo-mini-batch-size": run["A.actor.ppo_mini_batch_size"]}
    if run.script != ASYNC:
        size = run["data.train_batch_size"]
        run.skips("async_training.require_batches", f"{run.script} has one batch a step")
        if run.script == SYNC and size < (ranks := run["trainer.nnodes"] * run["trainer.n_gpus_per_node"]):
            fit = size // run["trainer.nnodes"]
            fit -= fit % max(1, run["A.rollout.tensor_model_parallel_size"])
            fewer = f"start {fit} ranks a node (--nproc-per-node {fit}), or " if fit > 0 else ""
            run.note(
                f"train_batch_size {size} is less than a prompt for each of the {ranks} ranks, which train_sync.py refuses: "
                f"{fewer}give --train-batch-size {ranks}, and a --ppo-mini-batch-size that divides it."
            )
        return {"--train-batch-size": size} | mini
    run.skips("data.train_batch_size", "a step is require_batches mini-batches, as in verl's fully async mode, which wants 0")
    return {"--train-batch-size": run.prompts_a_step} | (mini if run["async_training.require_batches"] > 1 else {})


# -- model and learner


def router_replay(run: Run) -> dict[str, object]:
    mode = run["A.actor.router_replay.mode"]
    ours = {"disabled": "off", None: "off", "R2": "R2", "R3": "R3"}.get(mode if isinstance(mode, str | None) else "")
    if ours is None:
        run.lacks("A.actor.router_replay.mode", "disabled, R2 and R3 alone")
    return {"--router-replay": ours}


def turns(run: Run) -> dict[str, object]:
    """Both are of use with several turns alone."""
    if not run["A.rollout.multi_turn.enable"]:
        return {}
    key = "A.rollout.multi_turn.format"
    form = {"hermes": "hermes", "llama3_json": "llama", "qwen3_coder": "xml"}.get(str(run[key]))
    if form is None:
        run.lacks(key, "hermes, llama3_json and qwen3_coder alone")
    return {"--max-turns": run["A.rollout.multi_turn.max_assistant_turns"], "--tool-format": form}


def router_dtype(run: Run) -> dict[str, object]:
    key = "A.actor.megatron.override_transformer_config.moe_router_dtype"
    ours = {"fp32": "float32"}.get(run[key]) if isinstance(run[key], str) else None
    if run[key] is not None and ours is None:
        run.lacks(key, "fp32 alone")
    return {"--moe-router-dtype": ours}


def warmup(run: Run) -> dict[str, object]:
    steps, ratio = run["A.actor.optim.lr_warmup_steps"], run["A.actor.optim.lr_warmup_steps_ratio"] or 0
    if steps is None or steps < 0:
        if ratio and run.steps is None:
            run.lacks(
                "A.actor.optim.lr_warmup_steps_ratio",
                f"the number of steps follows from the data: set --lr-warmup-steps to {ratio} times the run's steps",
            )
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
        run.lacks("A.actor.optim.lr_scheduler_type", "constant and cosine alone")
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
    return dict(zip(("--adam-beta1", "--adam-beta2"), pair, strict=True))


def token_budget(run: Run) -> dict[str, object]:
    of, shared_by = "A.actor.", max(1, run["A.actor.ulysses_sequence_parallel_size"])
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


# -- algorithm


def estimator(run: Run) -> dict[str, object]:
    word = run["algorithm.adv_estimator"]
    if not run["algorithm.norm_adv_by_std_in_grpo"]:
        if word in ("grpo", "grpo_vectorized"):
            word = "dr_grpo"
        else:
            run.lacks("algorithm.norm_adv_by_std_in_grpo", f"for grpo alone, not {word}")
    return {"--adv-estimator": "grpo" if word == "grpo_vectorized" else word}


def gdpo_keys(run: Run) -> dict[str, object]:
    return _of_gdpo(run, "reward_keys")


def gdpo_weights(run: Run) -> dict[str, object]:
    return _of_gdpo(run, "reward_weights")


def _of_gdpo(run: Run, what: str) -> dict[str, object]:
    """A list of verl's, which its other estimators do not look at."""
    key = f"algorithm.gdpo_{what}"
    if run["algorithm.adv_estimator"] != "gdpo":
        run.skips(key, "adv_estimator is not gdpo")
        return {}
    return {f"--gdpo-{what.replace('_', '-')}": listed(run[key]) or None}


def aggregation(run: Run) -> dict[str, object]:
    loss, mode = run["A.actor.policy_loss.loss_mode"], run["A.actor.loss_agg_mode"]
    if loss in ("geo_mean", "sapo") and mode != "seq-mean-token-mean":
        run.note(f"verl's {loss} aggregates as seq-mean-token-mean whatever loss_agg_mode says; it says {mode}.")
        mode = "seq-mean-token-mean"
    if loss == "gspo" and mode != "seq-mean-token-mean":
        run.note(
            f"verl 0.9.1 aggregates gspo as loss_agg_mode says, {mode}. Older versions always took seq-mean-token-mean, as the "
            "paper does: for that give --loss-agg-mode seq-mean-token-mean."
        )
    return {"--loss-agg-mode": mode}


LOSS_ARGS = {  # verl's loss -> verl's key -> our name
    "clip_cov": {"policy_loss.clip_cov_ratio": "ratio", "policy_loss.clip_cov_lb": "low", "policy_loss.clip_cov_ub": "high"},
    "kl_cov": {"policy_loss.kl_cov_ratio": "ratio", "policy_loss.ppo_kl_coef": "coef"},
    "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
    "dro": {"policy_loss.dro_beta": "beta"},
}


def loss_args(run: Run) -> dict[str, object]:
    loss = run["A.actor.policy_loss.loss_mode"]
    for other, args in LOSS_ARGS.items():
        if other != loss:
            run.skips(" ".join(f"A.actor.{key}" for key in args), f"the loss is {loss}")
    args = {name: run[f"A.actor.{key}"] for key, name in LOSS_ARGS.get(loss, {}).items()}
    return {"--loss-args": [f"{name}={value}" for name, value in args.items() if value is not None] or None}


def clips(run: Run) -> dict[str, object]:
    if run.has("A.actor.clip_ratio") and not (run.has("A.actor.clip_ratio_low") and run.has("A.actor.clip_ratio_high")):
        run.note("verl's yaml sets clip_ratio_low and clip_ratio_high to 0.2, which overrule clip_ratio there; here it counts.")
    sides = {}
    for side in ("low", "high"):
        given = run.has(f"A.actor.clip_ratio_{side}") or not run.has("A.actor.clip_ratio")
        sides[f"--clip-ratio-{side}"] = run[f"A.actor.clip_ratio_{side}" if given else "A.actor.clip_ratio"]
    return sides


def dual_clip(run: Run) -> dict[str, object]:
    # DPPO's own default, the paper's, never counts in verl: the actor's is in its place
    counts = run.has("A.actor.clip_ratio_c") or run["A.actor.policy_loss.loss_mode"] in ("dppo_tv", "dppo_kl")
    return {"--clip-ratio-c": run["A.actor.clip_ratio_c"] if counts else None}


def kl_loss(run: Run) -> dict[str, object]:
    if not run["A.actor.use_kl_loss"]:
        run.skips("A.actor.kl_loss_coef A.actor.kl_loss_type", "use_kl_loss is off")
        return {"--use-kl-loss": False}
    flags = {"--kl-loss-coef": run["A.actor.kl_loss_coef"], "--kl-loss-type": run["A.actor.kl_loss_type"]}
    return {"--use-kl-loss": True} | flags


def kl_in_reward(run: Run) -> dict[str, object]:
    if not run["algorithm.use_kl_in_reward"]:
        of = "algorithm.kl_ctrl."
        keys = ("algorithm.kl_penalty", *(of + key for key in ("type", "kl_coef", "target_kl", "horizon")))
        run.skips(" ".join(keys), "use_kl_in_reward is off")
        return {"--use-kl-in-reward": False}
    of, flags = "algorithm.kl_ctrl.", {"--use-kl-in-reward": True, "--kl-reward-type": run["algorithm.kl_penalty"]}
    flags |= {"--kl-ctrl-type": run[of + "type"], "--kl-reward-coef": run[of + "kl_coef"]}
    if run[of + "type"] == "adaptive":
        flags |= {"--target-kl": run[of + "target_kl"], "--kl-horizon": run[of + "horizon"]}
    return flags


def distillation(run: Run) -> dict[str, object]:
    loss, model = "distillation.distillation_loss.", "distillation.teacher_models.teacher_model.model_path"
    if not run["distillation.enabled"]:
        names = ("use_task_rewards", "distillation_loss_coef", "loss_mode", "topk", "use_policy_gradient")
        run.skips(" ".join([model, *(loss + name for name in names)]), "distillation is off")
        return {}
    mode, by_gradient = run[loss + "loss_mode"], run[loss + "use_policy_gradient"]
    flags = {"--teacher": run[model]}
    if run[loss + "use_task_rewards"]:
        flags["--teacher-coef"] = run[loss + "distillation_loss_coef"]
    else:
        flags["--teacher-alone"] = True
    if mode == "forward_kl_topk":
        run.note(
            "verl's forward_kl_topk is KL(teacher || policy) over the teacher's top tokens, here it is KL(policy || teacher)."
        )
        return flags | {"--teacher-top-k": run[loss + "topk"]}
    if mode != ("k1" if by_gradient else "k2"):
        run.note(f"verl's distillation loss {mode} becomes the advantage of k1, whose gradient is the KL's.")
    return flags


def critic(run: Run) -> dict[str, object]:
    if run["algorithm.adv_estimator"] != "gae":
        of = "critic.optim.lr critic.ppo_epochs critic.cliprange_value critic.model.path"
        run.skips(f"algorithm.lam trainer.critic_warmup {of}", "only gae has a critic")
        return {}
    epochs = run["A.actor.ppo_epochs"] if run["critic.ppo_epochs"] is None else run["critic.ppo_epochs"]
    model = run["critic.model.path"]
    return {
        "--lam": run["algorithm.lam"],
        "--critic-lr": run["critic.optim.lr"],
        "--critic-ppo-epochs": epochs,
        "--cliprange-value": run["critic.cliprange_value"],
        "--critic-model": None if model == run["A.model.path"] else model,
        "--critic-warmup": max(0, run["trainer.critic_warmup"] - 1),
    }


PRESETS = {  # verl's constructors of a correction -> their words
    "decoupled_token_is": "token_tis", "decoupled_seq_is": "sequence_tis", "decoupled_geo_rs": "geometric_rs",
    "decoupled_geo_rs_seq_tis": "sequence_tis_geometric_rs", "decoupled_token_icepop": "icepop",
}  # fmt: skip


def correction(run: Run) -> dict[str, object]:
    word, of = run[PRESET], PRESET + "."
    preset = CORRECTIONS.get(PRESETS.get(word.removesuffix("()"), word), {}) if isinstance(word, str) else {}
    if word and not preset:
        run.lacks(PRESET, f"{', '.join(CORRECTIONS)} are the words here")
    flags = {flag(name): value for name, value in preset.items()}
    weighs, rejects = run[of + "rollout_is"], run[of + "rollout_rs"]
    if weighs:
        flags["--rollout-is"] = weighs
    if weighs or (word and run.has(of + "rollout_is_threshold")):
        flags["--rollout-is-threshold"] = run[of + "rollout_is_threshold"]
    if weighs or word:
        flags["--rollout-is-batch-normalize"] = bool(run[of + "rollout_is_batch_normalize"])
    if rejects:
        flags["--rollout-rs"] = ",".join(map(str, listed(rejects)))
    if rejects or (word and run.has(of + "rollout_rs_threshold")):
        flags["--rollout-rs-threshold"] = run[of + "rollout_rs_threshold"]
    return flags


def old_log_probs(run: Run) -> dict[str, object]:
    bypass, use = "algorithm.rollout_correction.bypass_mode", "A.actor.use_rollout_log_probs"
    generators = bool(run[bypass] if run.has(bypass) or not run.has(use) else run[use])
    if not run.corrects:
        ours = run.script != SYNC  # what our scripts do by themselves
        return {"--use-rollout-log-probs": generators if generators != ours or run.has(bypass) else None}
    if generators:
        run.note(
            "verl's bypass_mode (on by default in its split modes) compares the policy being trained with the generator's, "
            "and ppo_clip then uses no weights. Here a correction always compares recomputed log-probs with the generator's, "
            "as verl does with bypass_mode=False, at the price of one more forward pass."
        )
    return {}


def filter_groups(run: Run) -> dict[str, object]:
    of = "algorithm.filter_groups."
    if not run[of + "enable"]:
        return {"--filter-groups": False}
    rounds, metric = run[of + "max_num_gen_batches"], run[of + "metric"]
    if metric not in (None, "reward", "score", "acc", "seq_reward", "seq_final_reward"):
        run.lacks(of + "metric", "groups are filtered by their score")
    elif metric == "acc" and run["reward.custom_reward_function.path"]:
        run.note("filter_groups compares the score of your reward function, not its acc.")
    elif metric in ("reward", "seq_reward", "seq_final_reward") and run["reward.reward_kwargs.overlong_buffer_cfg.enable"]:
        why = "groups are filtered by their score without the penalty on length"
        run.lacks(of + "metric", why)
        if not run.has(of + "metric"):
            run.note(f"verl's filter_groups compares the reward, the penalty on length in it: here {why}.")
    if not rounds or rounds < 0:
        run.note("verl sets no limit to the rounds of filter_groups; here --max-num-gen-batches does.")
        return {"--filter-groups": True}
    return {"--filter-groups": True, "--max-num-gen-batches": rounds}


# -- reward


def own_reward(run: Run) -> dict[str, object]:
    path, name = run["reward.custom_reward_function.path"], run["reward.custom_reward_function.name"]
    return {"--reward": f"{path}:{name}" if path else None}


def program_memory(run: Run) -> dict[str, object]:
    return {"--code-memory-limit-gb": run["reward.sandbox_fusion.memory_limit_mb"] / 1024}


def overlong(run: Run) -> dict[str, object]:
    of = "reward.reward_kwargs.overlong_buffer_cfg."
    if not run[of + "enable"]:
        run.skips(f"{of}len {of}penalty_factor reward.reward_kwargs.max_resp_len", "the overlong buffer is off")
        return {}
    if run["reward.reward_manager.name"] != "dapo":
        run.lacks(of + "enable", "verl itself penalises long responses with reward_manager=dapo alone")
        return {}
    budget = run["reward.reward_kwargs.max_resp_len"]
    if budget not in (None, run["data.max_response_length"]):
        run.lacks("reward.reward_kwargs.max_resp_len", "the penalty ends at --max-response-length")
    return {"--overlong-buffer-len": run[of + "len"], "--overlong-penalty-factor": run[of + "penalty_factor"]}


def reward_manager(run: Run) -> dict[str, object]:
    if run["reward.reward_manager.name"] not in ("naive", "dapo", "prime", "batch", "gdpo"):
        run.lacks("reward.reward_manager.name", "write what it does into a --reward function")
    return {}


# -- rollout


def engine(run: Run) -> dict[str, object]:
    if run["A.rollout.name"] != "vllm":
        run.lacks("A.rollout.name", "the engine is vLLM or the embedded one")
    return {"--engine": "vllm"}


def top_k(run: Run) -> dict[str, object]:
    return {"--top-k": run["A.rollout.top_k"] or -1}


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


def load_format(run: Run) -> dict[str, object]:
    given = run["A.rollout.load_format"] if run.has("A.rollout.load_format") else None
    return {"--load-format": "dummy" if str(given).startswith("dummy") else given}


def free_cache(run: Run) -> dict[str, object]:
    if run.script == SYNC:
        return {"--free-cache-engine": bool(run["A.rollout.free_cache_engine"])}
    run.skips("A.rollout.free_cache_engine", "a generator's engine keeps its memory")
    return {}


def rollout_dtype(run: Run) -> dict[str, object]:
    names = {"bfloat16": "bfloat16", "float32": "float32", "bf16": "bfloat16", "fp32": "float32"}
    ours = names.get(run["A.rollout.dtype"])
    if ours is None:
        run.lacks("A.rollout.dtype", "bfloat16 and float32 alone")
    return {"--rollout-dtype": "auto" if ours in (None, names.get(run[DTYPE])) else ours}


# -- trainer


def length(run: Run) -> dict[str, object]:
    epochs, steps = run["trainer.total_epochs"], run["trainer.total_training_steps"]
    if run.script == ASYNC and not run.is_v1:
        run.skips("trainer.total_training_steps", "verl's fully async mode goes by total_rollout_steps and epochs")
        return {"--total-epochs": epochs, "--total-rollout-steps": run["rollout.total_rollout_steps"]}
    if run["rollout.total_rollout_steps"] is not None:
        run.lacks("rollout.total_rollout_steps", "verl itself reads it in its fully async mode alone")
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
    return {"--logger": [name for name in names if name in LOGGERS] or None}
