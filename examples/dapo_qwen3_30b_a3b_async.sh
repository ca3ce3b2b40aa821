#!/usr/bin/env bash
# DAPO (arXiv 2503.14476), fully asynchronous: Qwen3-30B-A3B-Base on DAPO-Math-17k, 4 nodes of 4 generators and 4 learners.
#
#   MASTER=<first node> NODE_RANK=<0..3> examples/dapo_qwen3_30b_a3b_async.sh [further flags]        # on each of the 4 nodes
#
# Hardware: 32 devices of 80 GB (NPU: 64 GB). By count, not measured: 30.5B parameters x 16 bytes over 16 learners is 31 GB each; an
# engine of 4 devices holds 61 GB of weights. The first learner reads the model in fp32: 122 GB of the first node's host memory.
#
# What is missing today, so that nobody is surprised: mixtures of experts pass the model check (rl/attention.py), and updates of a
# small one are tested with vLLM, but there is no expert parallelism, no sequence parallelism (verl: ulysses 4) and no replay of the
# router's choices, and nothing of this size has been run. A node must both generate and learn: verl's 2 + 2 nodes are here 4 + 4
# devices on each of 4.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/dapo-math}
device=(--gpu-memory-utilization 0.8)
if [[ ${DEVICE:-gpu} == npu ]]; then device=(--gpu-memory-utilization 0.7 --max-num-seqs 128 --enforce-eager); fi

torchrun --nnodes 4 --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER:-localhost}" --master-port 29500 --nproc-per-node 8 \
  train_async.py --generators 4 --rollout-tp 4 \
  --model "${MODEL:-Qwen/Qwen3-30B-A3B-Base}" \
  --train-files "$DATA/dapo-math-17k.parquet" --val-files "$DATA/aime-2024.parquet" \
  --prompt-key prompt --truncation left --max-prompt-length 2048 --max-response-length 20480 \
  --staleness-threshold 0.6 --trigger-parameter-sync-step 16 --require-batches 1 --partial-rollout keep \
  --ppo-mini-batch-size 32 --rollout-n 16 \
  --adv-estimator grpo --loss-agg-mode token-mean --clip-ratio-low 0.2 --clip-ratio-high 0.28 --clip-ratio-c 10.0 \
  --entropy-coeff 0 \
  --filter-groups --max-num-gen-batches 10 --overlong-buffer-len 4096 --overlong-penalty-factor 1.0 \
  --lr 1e-6 --lr-warmup-steps 10 --lr-scheduler-type constant --weight-decay 0.1 --grad-clip 1.0 \
  --dtype bfloat16 --gradient-checkpointing --ppo-max-token-len-per-gpu 22528 \
  --temperature 1.0 --top-p 1.0 --top-k -1 --val-n 1 --val-temperature 1.0 --val-top-p 0.7 \
  --enable-chunked-prefill --max-num-batched-tokens 22528 \
  --total-training-steps 6400 --test-freq 400 \
  --experiment-name dapo-qwen3-30b-a3b-async \
  "${device[@]}" "$@"
