#!/usr/bin/env bash
# DAPO (arXiv 2503.14476), fully asynchronous: Qwen3-30B-A3B-Base on DAPO-Math-17k, 16 generators and 16 learners. verl's run on
# 16 + 16 NPUs, number by number.
#
#   MASTER=<first node> NODE_RANK=<n> examples/dapo_qwen3_30b_a3b_async.sh [further flags]        # on each node
#
# Hardware: 32 devices of 80 GB on 4 nodes of 8 (DEVICE=npu: 2 nodes of 16, 64 GB). By count, not measured: 30.5B parameters x 16
# bytes over 16 learners is 31 GB each; an engine of 2 devices holds 61 GB of weights. Each learner reads its own part of
# the weights; the first learner of each node, which sends, holds the copy that is published: 61 GB of host memory. Every node both
# generates and learns: verl's 16 + 16 are here 4 + 4 on each node (NPU: 8 + 8).
#
# What is missing today, so that nobody is surprised: there is no expert parallelism in the engine (verl: 2 in vLLM). A tiny model of
# the kind is trained with these flags in the tests; nothing of this size has been run. verl's run replays no router; for
# the experts that the generator chose add --router-replay R3 (docs/experts.md).
# Eight learners share a micro-batch of 8 x 4,096 tokens (verl: Ulysses 8); where a node has four of them, two nodes do.
# verl counts validations and checkpoints in publishes, every 25 and 50: 50 and 100 steps. 3,200 prompts are 200 steps, verl's 100
# publishes. The overlong buffer is off, as in verl's run.
# Data: python examples/make_data.py dapo-math
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/dapo-math}
nodes=4 ranks=8
if [[ ${DEVICE:-gpu} == npu ]]; then nodes=2 ranks=16; fi

torchrun --nnodes $nodes --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER:-localhost}" --master-port 29500 \
  --nproc-per-node $ranks train_async.py --generators $((ranks / 2)) \
  --model "${MODEL:-Qwen/Qwen3-30B-A3B-Base}" \
  --train-files "$DATA/dapo-math-17k.parquet" --val-files "$DATA/aime-2024.parquet" \
  --prompt-key prompt --truncation left --max-prompt-length 2048 --max-response-length 6144 \
  --staleness-threshold 0.75 --publish-every 2 --partial-rollout recompute \
  --train-batch-size 16 --rollout-n 4 \
  --adv-estimator grpo --loss-agg-mode token-mean --clip-ratio-low 0.2 --clip-ratio-high 0.28 --clip-ratio-c 10.0 \
  --entropy-coeff 0 \
  --lr 1e-6 --lr-warmup-steps 10 --lr-scheduler-type constant --weight-decay 0.1 --grad-clip 1.0 \
  --dtype bfloat16 --gradient-checkpointing --max-tokens-per-micro-batch 4096 --sequence-parallel 8 \
  --temperature 1.0 --top-p 1.0 --top-k -1 --val-n 1 --val-temperature 1.0 --val-top-p 0.7 \
  --engine vllm --rollout-tp 2 --gpu-memory-utilization 0.7 --max-num-seqs 128 --max-num-batched-tokens 8192 \
  --no-enforce-eager \
  --total-epochs 10 --total-rollout-steps 3200 --no-val-before-train --test-freq 50 --save-freq 100 --max-ckpt-to-keep 0 \
  --experiment-name dapo-qwen3-30b-a3b-async \
  "$@"
