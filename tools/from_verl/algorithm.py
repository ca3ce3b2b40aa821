"""The meaning of verl's keys for the algorithm: advantages, losses, KL terms, the critic, corrections (see meanings.py)."""

from rl.errors import UserError
from tools.from_verl.verl_run import PRESET, SYNC, Run, data, listed

WORDS = data("words.yaml")
LOSS_ARGS, CORRECTIONS, PRESETS = WORDS["loss_args"], WORDS["corrections"], WORDS["presets"]


def estimator(run: Run) -> dict[str, object]:
    word = run["algorithm.adv_estimator"]
    if not run["algorithm.norm_adv_by_std_in_grpo"]:
        if word in ("grpo", "grpo_vectorized"):
            word = "dr_grpo"
        else:
            run.lacks("algorithm.norm_adv_by_std_in_grpo", f"only for grpo, not {word}")
    if word == "gdpo":
        run.forks["gdpo"] = ("--gdpo-reward-keys", "--gdpo-reward-weights")
    elif word in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        run.forks["optimal_token_baseline"] = ()
    return {"--adv-estimator": "grpo" if word == "grpo_vectorized" else word}


def aggregation(run: Run) -> dict[str, object]:
    loss, mode = run["A.actor.policy_loss.loss_mode"], run["A.actor.loss_agg_mode"]
    if loss in ("geo_mean", "sapo", "gspo") and mode != "seq-mean-token-mean":
        run.note(f"verl's {loss} aggregates as seq-mean-token-mean whatever loss_agg_mode says; it says {mode}.")
        if loss == "gspo":
            run.note(f"verl 0.9.1 is the exception, and aggregates gspo as loss_agg_mode says: --loss-agg-mode {mode}.")
        mode = "seq-mean-token-mean"
    return {"--loss-agg-mode": mode}


def loss_args(run: Run) -> dict[str, object]:
    loss = run["A.actor.policy_loss.loss_mode"]
    for other, args in LOSS_ARGS.items():
        if other != loss:
            run.skips(" ".join(f"A.actor.{key}" for key in args), f"the loss is {loss}")
    args = {name: run[f"A.actor.{key}"] for key, name in LOSS_ARGS.get(loss, {}).items()}
    return {"--loss-args": [f"{name}={value}" for name, value in args.items() if value is not None]}


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


def kl_in_reward(run: Run) -> dict[str, object]:
    of = "algorithm.kl_ctrl."
    flags = {"--kl-reward-type": run["algorithm.kl_penalty"], "--kl-reward-coef": run[of + "kl_coef"]}
    if run[of + "type"] == "adaptive":
        run.forks["adaptive_kl"] = ("--target-kl", "--kl-horizon")
        flags |= {"--target-kl": run[of + "target_kl"], "--kl-horizon": run[of + "horizon"]}
    return flags


def distillation(run: Run) -> dict[str, object]:
    loss, models = "distillation.distillation_loss.", "distillation.teacher_models."
    paths = [key for key in run.given if key.startswith(models) and key.endswith(".model_path")]
    if len(paths) > 1:
        named = ", ".join(key.removeprefix(models).removesuffix(".model_path") for key in paths)
        raise UserError(
            f"{models[:-1]} has {len(paths)} teachers ({named}), each for the samples of its own data source. Here one teacher "
            "reads all samples: translate the run with one of them, and with the data that it is for."
        )
    mode, by_gradient = run[loss + "loss_mode"], run[loss + "use_policy_gradient"]
    if not paths:
        run.gaps.append(f"{models}NAME.model_path names no teacher: add --teacher.")
    flags = {"--teacher": run[paths[0]] if paths else None}
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


def correction(run: Run) -> dict[str, object]:
    word = run[PRESET]
    of = PRESET + "."
    flags = dict(CORRECTIONS.get(PRESETS.get(word.removesuffix("()"), word), {})) if isinstance(word, str) else {}
    if word and not flags:
        run.lacks(PRESET, f"{', '.join(CORRECTIONS)} are the words here")
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
