#!/usr/bin/env bash
# GRPO, fully asynchronous: Qwen2.5-0.5B-Instruct on GSM8K, one generator and one learner.
#
#   examples/grpo_qwen2.5_0.5b_gsm8k_async.sh [further flags]             # DEVICE=npu for Ascend
#
# Hardware: 1 + 1 devices of 24 GB or more. By count, not measured: the learner holds 0.5B parameters x 16 bytes = 8 GB and
# activations; the generator has its device for itself, hence 0.8.
# Staleness 0.2, a publish every 4 steps, unfinished responses live on. As in verl's fully async default the old log-probs are the
# generator's: the scripts with stale batches do so unless a --rollout-correction wants them recomputed.
# NPU: graph mode off (docs/engines.md). Not run on either kind yet.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/gsm8k}
device=()
if [[ ${DEVICE:-gpu} == npu ]]; then device=(--enforce-eager); fi

torchrun --standalone --nproc-per-node 2 train_async.py --generators 1 \
  --model Qwen/Qwen2.5-0.5B-Instruct \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" \
  --staleness-threshold 0.2 --trigger-parameter-sync-step 4 --partial-rollout keep \
  --ppo-mini-batch-size 64 --require-batches 1 --rollout-n 8 \
  --max-prompt-length 512 --max-response-length 1024 --filter-overlong-prompts --truncation error \
  --adv-estimator grpo --loss-agg-mode token-mean --entropy-coeff 0 \
  --lr 1e-6 --lr-warmup-steps 0 --lr-scheduler-type constant \
  --dtype bfloat16 --gradient-checkpointing --ppo-max-token-len-per-gpu 16384 \
  --gpu-memory-utilization 0.8 \
  --total-epochs 15 --test-freq 20 --save-freq 100 \
  --experiment-name grpo-qwen2.5-0.5b-gsm8k-async \
  "${device[@]}" "$@"
