#!/usr/bin/env bash
# GRPO, synchronous: Qwen2.5-0.5B-Instruct on GSM8K. Both devices generate, then both learn.
#
#   examples/grpo_qwen2.5_0.5b_gsm8k_sync.sh [further flags]              # DEVICE=npu for Ascend
#
# Hardware: 2 devices of 24 GB or more. By count, not measured: 0.5B parameters x 16 bytes (fp32 weights, gradients and Adam) over 2
# learners is 4 GB each; the engine takes 0.4 of the device, and sleeps while the learner works.
# NPU: graph mode off (docs/engines.md). Not run on either kind yet.
# Data: verl's gsm8k parquet files, in $DATA.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/gsm8k}
device=()
if [[ ${DEVICE:-gpu} == npu ]]; then device=(--enforce-eager); fi

torchrun --standalone --nproc-per-node 2 train_sync.py \
  --model Qwen/Qwen2.5-0.5B-Instruct \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" \
  --train-batch-size 1024 --ppo-mini-batch-size 256 --rollout-n 5 \
  --max-prompt-length 512 --max-response-length 1024 --filter-overlong-prompts --truncation error \
  --adv-estimator grpo --loss-agg-mode token-mean \
  --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k3 --entropy-coeff 0 \
  --lr 1e-6 --lr-warmup-steps 0 --lr-scheduler-type constant \
  --dtype bfloat16 --gradient-checkpointing --ppo-max-token-len-per-gpu 16384 \
  --gpu-memory-utilization 0.4 \
  --total-epochs 15 --test-freq 5 --save-freq 20 \
  --experiment-name grpo-qwen2.5-0.5b-gsm8k-sync \
  "${device[@]}" "$@"
