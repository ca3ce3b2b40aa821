#!/usr/bin/env bash
# GRPO, fully asynchronous, on images: Qwen3-VL-8B-Instruct on Geometry3K, with sequence_tis_geometric_rs.
#
#   examples/grpo_qwen3_vl_8b_geo3k_async.sh [further flags]              # DEVICE=npu for Ascend
#
# Refused today: prompts with images. The run ends at once with "...: the prompt has images, which cannot be used yet", whatever
# the flags; and the learner takes causal language models, which this class is not one of for transformers. The recipe stands here
# so that its flags are checked now, and there on the day images are.
#
# Hardware: 4 + 4 devices of 80 GB. By count, not measured: 8.8B parameters x 16 bytes over 4 learners is 35 GB each.
# The correction compares recomputed log-probs with the generator's, at the price of another forward pass.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/geo3k}
device=(--gpu-memory-utilization 0.8 --max-response-length 8192 --ppo-max-token-len-per-gpu 18432)
if [[ ${DEVICE:-gpu} == npu ]]; then
  device=(--gpu-memory-utilization 0.8 --max-response-length 2048 --ppo-max-token-len-per-gpu 16384 --enforce-eager)
fi

torchrun --standalone --nproc-per-node 8 train_async.py --generators 4 --rollout-tp 1 \
  --model Qwen/Qwen3-VL-8B-Instruct \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" \
  --max-prompt-length 1024 --filter-overlong-prompts --truncation error \
  --staleness-threshold 0.5 --trigger-parameter-sync-step 2 --require-batches 1 --partial-rollout keep \
  --ppo-mini-batch-size 128 --rollout-n 8 \
  --adv-estimator grpo --loss-agg-mode token-mean --rollout-correction sequence_tis_geometric_rs \
  --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k3 --entropy-coeff 0 \
  --lr 1e-6 --lr-warmup-steps 0 --lr-scheduler-type constant --grad-clip 1.0 \
  --dtype bfloat16 --gradient-checkpointing --ref-offload \
  --max-num-batched-tokens 32768 \
  --total-training-steps 400 --test-freq 10 --log-val-generations 10 \
  --experiment-name grpo-qwen3-vl-8b-geo3k-async \
  "${device[@]}" "$@"
