"""Flag names: the common ones, which --help shows, and other programs' names for them.

HERE explains unknown flags; docs/generated/trl-words.md is made from it. Left out: verl's names, which tools/from_verl
translates.
"""

from collections.abc import Iterable

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


def hint(unknown: Iterable[str]) -> str:
    """Return text with a sentence for each unknown flag that has a replacement."""
    names = dict.fromkeys(word.partition("=")[0].replace("_", "-") for word in unknown)
    return "".join(f" {name}: here {HERE[name]}." for name in names if name in HERE)
