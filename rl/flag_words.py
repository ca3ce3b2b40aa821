"""Words of TRL, and of another script of ours, for our flags: what the message for an unknown flag says.

docs/generated/trl-words.md is made of HERE. Left out: verl's, which rl/from_verl translates.
"""

from collections.abc import Iterable

HERE = {  # unknown flag -> what it is here
    # of train_sync.py, in train_async.py
    "--train-batch-size": "--ppo-mini-batch-size times --require-batches is a step's prompts",
    # TRL's GRPOConfig and ScriptArguments (1.8)
    "--model-name-or-path": "--model",
    "--dataset-name": "--train-files",
    "--reward-funcs": "--reward FILE.py:FUNCTION",
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
    "--delta": "--clip-ratio-c, where the advantage is negative alone",
    "--loss-type": "--loss-agg-mode, --adv-estimator or --loss-mode",
    "--importance-sampling-level": "--loss-mode gspo for sequences",
    "--scale-rewards": "--adv-estimator dr_grpo for none",
    "--mask-truncated-completions": "--overlong-buffer-len for a penalty instead",
    "--per-device-train-batch-size": "--ppo-max-token-len-per-gpu tokens make a micro-batch",
    "--gradient-accumulation-steps": "it follows from --ppo-mini-batch-size, the prompts of an optimizer step",
    "--num-train-epochs": "--total-epochs",
    "--max-steps": "--total-training-steps",
    "--eval-steps": "--test-freq",
    "--save-steps": "--save-freq",
    "--save-total-limit": "--max-ckpt-to-keep",
    "--resume-from-checkpoint": "--resume-mode",
    "--report-to": "--logger",
    "--run-name": "--experiment-name",
    "--use-vllm": "--engine vllm",
    "--vllm-gpu-memory-utilization": "--gpu-memory-utilization",
    "--vllm-tensor-parallel-size": "--rollout-tp",
    "--vllm-importance-sampling-correction": "--rollout-is token or sequence",
    "--vllm-enable-sleep-mode": "--free-cache-engine",
    "--use-peft": "not here: adapters are not trained",
}


def hint(unknown: Iterable[str]) -> str:
    """A sentence for each of the unknown flags that has a word here; empty if none has."""
    names = (word.partition("=")[0].replace("_", "-") for word in unknown)
    return "".join(f" {name}: here {HERE[name]}." for name in dict.fromkeys(names) if name in HERE)
