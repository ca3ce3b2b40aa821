"""Flag names: the common ones, earlier names, and other programs' names for them.

--help shows the COMMON flags. RENAMED and EARLIER_WORDS are still accepted. HERE explains unknown flags;
docs/generated/trl-words.md is made from it. Left out: verl's names, which tools/from_verl translates.
"""

from collections.abc import Container, Iterable, Sequence

from rl.ranges import flag

DEFAULT_BATCH = 8  # prompts per step if no flag says so
# Fields whose flags --help shows, in addition to those that a copy of a script adds; --help-all shows every flag
COMMON = {
    *("model", "total_training_steps", "total_epochs", "test_freq"),
    *("train_files", "val_files", "max_prompt_length"),
    "reward",
    *("adv_estimator", "loss_mode", "use_kl_loss", "kl_loss_coef"),
    *("train_batch_size", "ppo_mini_batch_size", "publish_every", "staleness_threshold", "generators"),
    *("engine", "rollout_n", "max_response_length", "temperature", "rollout_tp"),
    *("lr", "gradient_checkpointing", "lora_rank"),
    *("experiment_name", "output_dir", "logger", "save_freq"),
}

RENAMED = {  # earlier name of a field, still accepted -> current name
    "trigger_parameter_sync_step": "publish_every",
    "ppo_max_token_len_per_gpu": "max_tokens_per_micro_batch",
    "on_error": "on_reward_error",
    "record": "record_samples",
    "kl_penalty": "kl_reward_type",
    "kl_coef": "kl_reward_coef",
}

EARLIER_WORDS = {("engine", "transformers"): "embedded"}  # (field, earlier word, still accepted) -> current word

HERE = {  # unknown flag -> its replacement
    # TRL's GRPOConfig and ScriptArguments (1.16, the version in requirements-bench.txt)
    "--model-name-or-path": "--model",
    "--dataset-name": "--train-files",
    "--reward-funcs": "--reward FILE.py:FUNCTION",
    "--reward-weights": "the function's score is the sum; examples/forks/gdpo.diff weighs named rewards",
    "--multi-objective-aggregation": "examples/forks/gdpo.diff for normalize_then_sum",
    "--learning-rate": "--lr",
    "--warmup-steps": "--lr-warmup-steps",
    "--max-grad-norm": "--grad-clip",
    "--bf16": "--dtype bfloat16",
    "--num-generations": "--rollout-n",
    "--num-iterations": "--ppo-epochs",
    "--max-completion-length": "--max-response-length",
    "--beta": "--use-kl-loss --kl-loss-coef",
    "--epsilon": "--clip-ratio-low and --clip-ratio-high",
    "--epsilon-high": "--clip-ratio-high",
    "--delta": "--clip-ratio-c, only for negative advantages",
    "--loss-type": "--loss-agg-mode, --adv-estimator or --loss-mode",
    "--importance-sampling-level": "--loss-mode gspo for sequences",
    "--scale-rewards": "--adv-estimator dr_grpo for none, grpo_batch_std for batch",
    "--use-bias-correction-kl": "--kl-loss-type k3r",
    "--entropy-coef": "--entropy-coeff",
    "--use-adaptive-entropy": "examples/forks/entropy_target.diff",
    "--vespo-k-pos": "--loss-args k_pos=2 k_neg=3 lam_pos=3 lam_neg=2",
    "--mask-truncated-completions": "--overlong-buffer-len for a penalty instead",
    "--per-device-train-batch-size": "--max-tokens-per-micro-batch tokens make a micro-batch",
    "--gradient-accumulation-steps": "it follows from --ppo-mini-batch-size, the prompts of an optimizer step",
    "--num-train-epochs": "--total-epochs",
    "--max-steps": "--total-training-steps",
    "--eval-steps": "--test-freq",
    "--save-steps": "--save-freq",
    "--save-total-limit": "--max-ckpt-to-keep",
    "--resume-from-checkpoint": "--resume-mode",
    "--report-to": "--logger",
    "--wandb-mode": "WANDB_MODE in the environment",
    "--node-timeout": "--hang-timeout",
    "--run-name": "--experiment-name",
    "--use-vllm": "--engine vllm",
    "--vllm-gpu-memory-utilization": "--gpu-memory-utilization",
    "--vllm-tensor-parallel-size": "--rollout-tp",
    "--vllm-importance-sampling-correction": "--rollout-is token or sequence",
    "--vllm-enable-sleep-mode": "the engine of train_sync.py always frees its memory while the learner works",
    "--use-peft": "--lora-rank",
    "--lora-r": "--lora-rank",
    "--lora-target-modules": "--lora-target",
}


def current(words: Sequence[str], fields: Container[str] = ()) -> list[str]:
    """Return the command line with flags under their current names, with hyphens. fields: the script's, whose names stay."""
    found: list[str] = []
    field = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            field = _today(name[2:].replace("-", "_"), fields)
            word = flag(field) + equals + EARLIER_WORDS.get((field, value), value)
        found.append(EARLIER_WORDS.get((field, word), word))
    return found


def _today(name: str, fields: Container[str]) -> str:
    return name if name in fields else RENAMED.get(name, name)


def renamed(flags: dict, fields: Container[str] = ()) -> dict:
    """Return the flags that a run recorded, under their current names. fields: the script's, whose names stay."""
    earlier = {name: today for name in flags if (today := _today(name, fields)) != name}
    flags = {earlier[name]: flags[name] for name in earlier} | {name: flags[name] for name in flags if name not in earlier}
    return flags | {name: word for (name, earlier_word), word in EARLIER_WORDS.items() if flags.get(name) == earlier_word}


def hint(unknown: Iterable[str]) -> str:
    """Return text with a sentence for each unknown flag that has a replacement."""
    names = dict.fromkeys(word.partition("=")[0].replace("_", "-") for word in unknown)
    return "".join(f" {name}: here {HERE[name]}." for name in names if name in HERE)
