#!/usr/bin/env bash
# GRPO, fully asynchronous: Qwen2.5-0.5B-Instruct on GSM8K, one generator and one learner. verl's run on 1 + 1 NPUs, number by number.
#
#   examples/grpo_qwen2.5_0.5b_gsm8k_async.sh [further flags]             # DEVICE=npu for Ascend
#
# Hardware: 1 + 1 devices of 24 GB or more. By count, not measured: the learner holds 0.5B parameters x 16 bytes = 8 GB, the
# reference policy 2 GB and activations; the generator has its device for itself, hence 0.8.
# Unlike verl: FSDP2 instead of Megatron with every parallel size 1. Graph mode is off on an NPU alone. Not run on either kind yet.
# Data: verl's gsm8k parquet files, in $DATA (python examples/make_data.py gsm8k). verl validates every 20 publishes: every 80 steps. One epoch is 116 steps of 64 prompts.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/gsm8k}
device=()
if [[ ${DEVICE:-gpu} == npu ]]; then device=(--enforce-eager); fi

torchrun --standalone --nproc-per-node 2 train_async.py --generators 1 \
  --model "${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" \
  --prompt-key prompt --truncation left --max-prompt-length 2048 --max-response-length 3072 \
  --staleness-threshold 0.2 --publish-every 4 --partial-rollout recompute \
  --train-batch-size 64 --rollout-n 8 \
  --adv-estimator grpo --loss-agg-mode token-mean --clip-ratio-low 0.2 --clip-ratio-high 0.28 --clip-ratio-c 10.0 \
  --kl-loss-coef 0.001 --kl-loss-type low_var_kl --entropy-coeff 0 \
  --overlong-buffer-len 512 --overlong-penalty-factor 1.0 \
  --lr 1e-6 --lr-warmup-steps 10 --lr-scheduler-type constant --weight-decay 0.1 --grad-clip 1.0 \
  --dtype bfloat16 --gradient-checkpointing --max-tokens-per-micro-batch 5120 \
  --temperature 1.0 --top-p 1.0 --top-k -1 --val-n 1 --val-temperature 1.0 --val-top-p 0.7 \
  --engine vllm --rollout-tp 1 --gpu-memory-utilization 0.8 --max-num-batched-tokens 5120 \
  --total-epochs 1 --total-rollout-steps 51200 --no-val-before-train --test-freq 80 --save-freq 0 --log-val-generations 10 \
  --experiment-name grpo-qwen2.5-0.5b-gsm8k-async \
  "${device[@]}" "$@"
