"""The common flags, which --help shows."""

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
