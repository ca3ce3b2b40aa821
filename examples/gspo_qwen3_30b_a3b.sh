#!/usr/bin/env bash
# GSPO (arXiv 2507.18071), synchronous: Qwen3-30B-A3B on DAPO-Math-17k, 8 optimizer steps a batch. verl's run on 2 nodes of 8 NPUs,
# number by number.
#
#   MASTER=<first node> NODE_RANK=<0 or 1> examples/gspo_qwen3_30b_a3b.sh [further flags]         # on each node
#
# GRPO on the same set-up, which its report compares with: add
#   --loss-mode ppo_clip --loss-agg-mode token-mean --clip-ratio-low 0.2 --clip-ratio-high 0.28 --clip-ratio-c 10.0
# The run does not validate. To validate, add --val-files data/dapo-math/aime-2024.parquet --test-freq 20
# GSPO needs no replay of the router, GRPO on a mixture of experts does (the paper, section 5.3): add --router-replay R2 or R3 then.
#
# Hardware: 16 devices of 64 GB or more. By count, not measured: 30.5B parameters x 16 bytes over 16 learners is 31 GB each, in host
# memory; an engine of 4 devices holds 61 GB of weights. Each rank reads its own part of the weights.
#
# What is another thing here: verl has Megatron with 4 pipeline stages, tensor parallelism 4 and expert parallelism 8, and one engine
# of 8 x 4 ranks that share experts. Here the learner is sharded over all ranks (FSDP2), the 8 of a node share experts, an engine is
# 4 ranks, and nothing of this size has been run.
# The run's loss_agg_mode is token-mean, which only verl 0.9.1 follows for GSPO: add --loss-agg-mode token-mean. Other versions take
# seq-mean-token-mean whatever the key says, as the paper does.
# Data: python examples/make_data.py dapo-math
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-data/dapo-math}

torchrun --nnodes 2 --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER:-localhost}" --master-port 29500 \
  --nproc-per-node 8 train_sync.py \
  --model "${MODEL:-Qwen/Qwen3-30B-A3B}" \
  --train-files "$DATA/dapo-math-17k.parquet" \
  --prompt-key prompt --truncation left --max-prompt-length 2048 --max-response-length 8192 \
  --train-batch-size 32 --ppo-mini-batch-size 4 --rollout-n 2 \
  --adv-estimator grpo --loss-mode gspo --loss-agg-mode seq-mean-token-mean \
  --clip-ratio-low 3e-4 --clip-ratio-high 4e-4 --entropy-coeff 0 \
  --overlong-buffer-len 4096 --overlong-penalty-factor 1.0 \
  --lr 1e-6 --lr-warmup-steps 10 --lr-scheduler-type constant --weight-decay 0.1 --grad-clip 1.0 \
  --dtype bfloat16 --gradient-checkpointing --param-offload --max-tokens-per-micro-batch 10240 --expert-parallel 8 \
  --engine vllm --rollout-tp 4 --gpu-memory-utilization 0.8 --max-num-batched-tokens 10240 \
  --total-training-steps 300 --no-val-before-train --test-freq 0 --save-freq 0 \
  --experiment-name gspo-qwen3-30b-a3b \
  "$@"
