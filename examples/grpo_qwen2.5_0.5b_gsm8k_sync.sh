#!/usr/bin/env bash
# GRPO, synchronous: Qwen2.5-0.5B-Instruct on GSM8K. Both devices generate, then both learn. verl's run on 2 NPUs, number by number.
#
#   examples/grpo_qwen2.5_0.5b_gsm8k_sync.sh [further flags]              # the same on GPU and NPU
#
# Hardware: 2 devices of 24 GB or more. By count, not measured: 0.5B parameters x 16 bytes (fp32 weights, gradients and Adam) over 2
# learners is 4 GB each; the engine takes 0.7 of the device, and sleeps while the learner works. Not run on either kind yet.
# Data: verl's gsm8k parquet files, in $DATA (python examples/make_data.py gsm8k).
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/gsm8k}

torchrun --standalone --nproc-per-node 2 train_sync.py \
  --model "${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" \
  --train-batch-size 128 --ppo-mini-batch-size 64 --rollout-n 8 \
  --max-prompt-length 2048 --max-response-length 3072 --filter-overlong-prompts --truncation error \
  --adv-estimator grpo --loss-agg-mode token-mean --clip-ratio-low 0.2 --clip-ratio-high 0.2 \
  --kl-loss-coef 0.001 --kl-loss-type low_var_kl --entropy-coeff 0.001 \
  --lr 5e-7 --lr-warmup-steps 0 --lr-scheduler-type constant \
  --dtype bfloat16 --gradient-checkpointing --max-tokens-per-micro-batch 10240 \
  --engine vllm --rollout-tp 2 --gpu-memory-utilization 0.7 \
  --total-epochs 1 --test-freq 5 --save-freq 0 \
  --experiment-name grpo-qwen2.5-0.5b-gsm8k-sync \
  "$@"
