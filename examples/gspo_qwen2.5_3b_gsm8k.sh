#!/usr/bin/env bash
# GSPO (arXiv 2507.18071), synchronous: Qwen2.5-3B-Instruct on GSM8K, clips 3e-4 and 4e-4, 4 optimizer steps a batch. verl's run on
# 8 NPUs, number by number.
#
#   examples/gspo_qwen2.5_3b_gsm8k.sh [further flags]                     # DEVICE=npu for Ascend
#
# Hardware: 8 devices of 80 GB (NPU: 64 GB). By count, not measured: 3.1B parameters x 16 bytes over 8 learners is 6 GB each, in host
# memory; four devices share a micro-batch of 40,960 tokens, a quarter of which wants some 5 GB of activations on each; two devices
# share an engine, which takes its share and sleeps while the learner works. Graph mode is off on an NPU alone. Not run on either
# kind yet.
# Data: verl's gsm8k parquet files, in $DATA (python examples/make_data.py gsm8k).
# verl's warm-up is 0.05 of 500 steps. Its 10 epochs would end the run after 140 steps.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/gsm8k}
device=()
if [[ ${DEVICE:-gpu} == npu ]]; then device=(--enforce-eager); fi

torchrun --standalone --nproc-per-node 8 train_sync.py \
  --model "${MODEL:-Qwen/Qwen2.5-3B-Instruct}" \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" --shuffle \
  --train-batch-size 512 --ppo-mini-batch-size 128 --rollout-n 16 \
  --max-prompt-length 2048 --max-response-length 8192 --filter-overlong-prompts --truncation error \
  --adv-estimator grpo --loss-mode gspo --loss-agg-mode seq-mean-token-mean \
  --clip-ratio-low 3e-4 --clip-ratio-high 4e-4 --entropy-coeff 0 \
  --lr 1e-6 --lr-warmup-steps 25 --lr-scheduler-type constant --weight-decay 0.1 --grad-clip 1.0 \
  --dtype bfloat16 --gradient-checkpointing --param-offload --max-tokens-per-micro-batch 10240 --sequence-parallel 4 \
  --temperature 1.0 --top-p 1.0 --top-k -1 --val-n 1 --val-temperature 1.0 --val-top-p 0.7 \
  --engine vllm --rollout-tp 2 --gpu-memory-utilization 0.6 --max-num-batched-tokens 10240 \
  --total-training-steps 500 --no-val-before-train --test-freq 10 --save-freq 10 --max-ckpt-to-keep 0 --log-val-generations 2 \
  --experiment-name gspo-qwen2.5-3b-gsm8k \
  "${device[@]}" "$@"
