#!/usr/bin/env bash
# GRPO, one step off: Qwen2.5-3B-Instruct on GSM8K, 4 generators and 4 learners.
#
#   examples/grpo_qwen2.5_3b_gsm8k_one_step_off.sh [further flags]        # DEVICE=npu for Ascend
#
# Hardware: 4 + 4 devices of 40 GB or more. By count, not measured: 3.1B parameters x 16 bytes over 4 learners is 12 GB each, the
# reference (--use-kl-loss) waits in host memory, one copy of 12 GB over the 4; an engine holds 6 GB of weights and its KV cache.
# NPU: graph mode off (docs/engines.md), two devices share an engine. Not run on either kind yet.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/gsm8k}
device=(--rollout-tp 1)
if [[ ${DEVICE:-gpu} == npu ]]; then device=(--enforce-eager --rollout-tp 2); fi

torchrun --standalone --nproc-per-node 8 train_one_step_off.py --generators 4 \
  --model Qwen/Qwen2.5-3B-Instruct \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" \
  --train-batch-size 1152 --ppo-mini-batch-size 192 --rollout-n 16 \
  --max-prompt-length 512 --max-response-length 1024 --filter-overlong-prompts --truncation error \
  --adv-estimator grpo --loss-agg-mode token-mean \
  --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k3 --entropy-coeff 0 \
  --lr 3e-6 --lr-warmup-steps 0 --lr-scheduler-type constant \
  --dtype bfloat16 --gradient-checkpointing --ppo-max-token-len-per-gpu 16384 \
  --gpu-memory-utilization 0.8 --load-format auto \
  --total-epochs 2 --test-freq 5 \
  --experiment-name grpo-qwen2.5-3b-gsm8k-one-step-off \
  "${device[@]}" "$@"
