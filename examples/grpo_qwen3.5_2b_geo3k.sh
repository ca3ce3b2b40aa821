#!/usr/bin/env bash
# GRPO, synchronous, on images: Qwen3.5-2B on Geometry3K. verl's run on 8 devices, number by number.
#
#   examples/grpo_qwen3.5_2b_geo3k.sh [further flags]              # the same on GPU and NPU
#
# Hardware: 8 devices of 24 GB or more. By count, not measured: 2B parameters x 16 bytes wait in host memory, 4 GB a learner; an
# engine of 4 devices holds 4 GB of weights, and takes 0.3 of each device. Not run on either kind yet.
# Unlike verl: its data are Open-R1's multimodal problems, with a grader of its own (--train-files, --reward). docs/models.md says what
# is particular of this family.
# Data: python examples/make_data.py geo3k
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/geo3k}

torchrun --standalone --nproc-per-node 8 train_sync.py \
  --model "${MODEL:-Qwen/Qwen3.5-2B}" \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" --no-shuffle \
  --train-batch-size 64 --ppo-mini-batch-size 16 --rollout-n 5 \
  --max-prompt-length 2048 --max-response-length 1536 --filter-overlong-prompts --truncation error \
  --adv-estimator grpo --loss-agg-mode token-mean --clip-ratio-low 0.2 --clip-ratio-high 0.2 \
  --kl-loss-coef 0.02 --kl-loss-type low_var_kl --entropy-coeff 0 \
  --lr 5e-7 --lr-warmup-steps 0 --lr-scheduler-type constant \
  --dtype bfloat16 --gradient-checkpointing --max-tokens-per-micro-batch 3584 --param-offload \
  --engine vllm --rollout-tp 4 --gpu-memory-utilization 0.3 --max-num-batched-tokens 4096 \
  --total-epochs 15 --no-val-before-train --test-freq 5 --save-freq 5 --max-ckpt-to-keep 0 \
  --experiment-name grpo-qwen3.5-2b-geo3k \
  "$@"
