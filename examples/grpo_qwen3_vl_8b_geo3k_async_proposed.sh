#!/usr/bin/env bash
# GRPO, fully asynchronous, on images: Qwen3-VL-8B-Instruct on Geometry3K, 16 generators and 16 learners.
# verl's run as it was proposed: staler, with sequence_tis_geometric_rs; otherwise grpo_qwen3_vl_8b_geo3k_async.sh.
#
#   MASTER=<first node> NODE_RANK=<n> examples/grpo_qwen3_vl_8b_geo3k_async_proposed.sh [further flags]   # on each node
#
# Hardware: 32 devices of 80 GB on 4 nodes of 8 (DEVICE=npu: 2 nodes of 16, 64 GB). By count, not measured: 8.8B parameters x 16
# bytes over 16 learners is 9 GB each, the reference policy 2 GB. Every node both generates and learns: verl's 16 + 16 are here
# 4 + 4 on each node (NPU: 8 + 8). verl's own layout, nodes of one role: GENERATORS=0 where a node learns (the first one), and
# GENERATORS=8 (NPU: 16) where it generates.
# Data: python examples/make_data.py geo3k
# The correction recomputes log-probs and compares them with the generator's, at the price of another forward pass. Its band for the
# mean ratio of a response, 0.999_1.001, is narrow: stale, short or bf16 responses may all be rejected, and nothing is learned. Watch
# rollout_corr/rollout_rs_masked_fraction; a wider band is --rollout-rs-threshold 0.99_1.01.
# verl validates every 5 publishes: every 25 steps. 51,200 prompts are 400 steps.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/geo3k}
nodes=4 ranks=8
if [[ ${DEVICE:-gpu} == npu ]]; then nodes=2 ranks=16; fi

torchrun --nnodes $nodes --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER:-localhost}" --master-port 29500 \
  --nproc-per-node $ranks train_async.py --generators "${GENERATORS:-$((ranks / 2))}" \
  --model "${MODEL:-Qwen/Qwen3-VL-8B-Instruct}" \
  --train-files "$DATA/train.parquet" --val-files "$DATA/test.parquet" --no-shuffle \
  --max-prompt-length 1024 --max-response-length 2048 --filter-overlong-prompts --truncation error \
  --staleness-threshold 10 --publish-every 5 --partial-rollout recompute \
  --train-batch-size 128 --ppo-mini-batch-size 64 --rollout-n 4 \
  --adv-estimator grpo --loss-agg-mode token-mean --clip-ratio-low 0.2 --clip-ratio-high 0.2 \
  --rollout-is sequence --rollout-rs seq_mean_k1 --rollout-rs-threshold 0.999_1.001 \
  --kl-loss-coef 0.01 --kl-loss-type low_var_kl --entropy-coeff 0 \
  --lr 1e-6 --lr-warmup-steps 0 --lr-scheduler-type constant \
  --dtype bfloat16 --gradient-checkpointing --max-tokens-per-micro-batch 16384 \
  --engine vllm --rollout-tp 1 --gpu-memory-utilization 0.8 --max-num-batched-tokens 32768 \
  --total-epochs 200 --total-rollout-steps 51200 --no-val-before-train --test-freq 25 --save-freq 0 \
  --experiment-name grpo-qwen3-vl-8b-geo3k-async-proposed \
  "$@"
