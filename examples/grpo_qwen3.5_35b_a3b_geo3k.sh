#!/usr/bin/env bash
# GRPO, synchronous, on images: Qwen3.5-35B-A3B on Geometry3K. verl's run on 8 GPUs, number by number.
#
#   examples/grpo_qwen3.5_35b_a3b_geo3k.sh [further flags]              # the same on GPU and NPU
#
# Hardware: 8 devices of 80 GB, and 800 GB of host memory. By count, not measured: 35B parameters x 16 bytes are 560 GB in all, 70 GB
# a learner, which wait in host memory, and the reference's 140 GB next to them; an engine of 4 devices holds 70 GB of weights. Not
# run on either kind yet; verl takes 16 NPUs (--nproc-per-node 16). verl's run replays no router: for the experts that the generator
# chose add --router-replay R3 (docs/experts.md). docs/models.md says what is particular of this family.
# Data: python examples/make_data.py geo3k
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/geo3k}

torchrun --standalone --nproc-per-node 8 train_sync.py \
  --model "${MODEL:-Qwen/Qwen3.5-35B-A3B}" \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" --no-shuffle \
  --train-batch-size 64 --ppo-mini-batch-size 16 --rollout-n 5 \
  --max-prompt-length 1024 --max-response-length 2048 --filter-overlong-prompts --truncation error \
  --adv-estimator grpo --loss-agg-mode token-mean --clip-ratio-low 0.2 --clip-ratio-high 0.2 \
  --kl-loss-coef 0.01 --kl-loss-type low_var_kl --entropy-coeff 0 \
  --lr 1e-6 --lr-warmup-steps 0 --lr-scheduler-type constant \
  --dtype bfloat16 --gradient-checkpointing --max-tokens-per-micro-batch 3072 --param-offload \
  --engine vllm --rollout-tp 4 --gpu-memory-utilization 0.6 --max-num-batched-tokens 8192 \
  --total-epochs 15 --val-before-train --test-freq 5 --save-freq 5 --max-ckpt-to-keep 0 \
  --experiment-name grpo-qwen3.5-35b-a3b-geo3k \
  "$@"
