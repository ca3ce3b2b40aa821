#!/usr/bin/env bash
# GRPO, one step off: Qwen2.5-3B-Instruct on GSM8K, 4 generators and 4 learners. verl's run on 4 + 4 GPUs, number by number.
#
#   examples/grpo_qwen2.5_3b_gsm8k_one_step_off.sh [further flags]        # the same on GPU and NPU
#
# Hardware: 4 + 4 devices of 40 GB or more. By count, not measured: 3.1B parameters x 16 bytes over 4 learners is 12 GB each, the
# reference (--kl-loss-coef) waits in host memory, one copy of 12 GB over the 4; two devices share an engine, which holds 6 GB of
# weights and its KV cache. Not run on either kind yet.
# Micro-batches of 12,288 tokens are verl's 8 sequences; its first script had 40 of them, 61,440 tokens. Only memory differs.
# verl's run validates only before the first step; here --test-freq 0 turns this off, too. To validate, add
#   --val-files data/gsm8k/test.parquet --test-freq 20
# Data: verl's gsm8k parquet files, in $DATA (python examples/make_data.py gsm8k).
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/gsm8k}

torchrun --standalone --nproc-per-node 8 train_one_step_off.py --generators 4 \
  --model "${MODEL:-Qwen/Qwen2.5-3B-Instruct}" \
  --train-files "$DATA/train.parquet" --no-shuffle \
  --train-batch-size 1024 --ppo-mini-batch-size 256 --rollout-n 5 \
  --max-prompt-length 512 --max-response-length 1024 --filter-overlong-prompts --truncation error \
  --adv-estimator grpo --loss-agg-mode token-mean --clip-ratio-low 0.2 --clip-ratio-high 0.2 \
  --kl-loss-coef 0.001 --kl-loss-type low_var_kl --entropy-coeff 0 \
  --lr 3e-6 --lr-warmup-steps 0 --lr-scheduler-type constant \
  --dtype bfloat16 --gradient-checkpointing --max-tokens-per-micro-batch 12288 \
  --engine vllm --rollout-tp 2 --gpu-memory-utilization 0.6 \
  --total-epochs 15 --test-freq 0 --save-freq 0 \
  --experiment-name grpo-qwen2.5-3b-gsm8k-one-step-off \
  "$@"
