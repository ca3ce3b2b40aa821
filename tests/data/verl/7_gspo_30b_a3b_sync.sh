#!/usr/bin/env bash
set -xeuo pipefail
NNODES=2
NPUS_PER_NODE=8
TP=4 PP=4 EP=8 ETP=1
offload=True
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
tokens=$((max_prompt_length + max_response_length))

MEGATRON=()
for role in actor ref; do
    MEGATRON+=(
        actor_rollout_ref.$role.megatron.tensor_model_parallel_size=$TP
        actor_rollout_ref.$role.megatron.pipeline_model_parallel_size=$PP
        actor_rollout_ref.$role.megatron.expert_model_parallel_size=$EP
        actor_rollout_ref.$role.megatron.expert_tensor_parallel_size=$ETP
        actor_rollout_ref.$role.megatron.param_offload=$offload
        actor_rollout_ref.$role.megatron.use_dist_checkpointing=False
    )
done

ray job submit --no-wait -- python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    algorithm.kl_ctrl.kl_coef=0.0 \
    data.train_files=data/dapo-math/dapo-math-17k.parquet \
    data.val_files=data/dapo-math/aime-2024.parquet \
    data.prompt_key=prompt \
    data.truncation=left \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=$max_response_length \
    data.train_batch_size=32 \
    data.gen_batch_size=32 \
    actor_rollout_ref.nccl_timeout=14400 \
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 \
    actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.optim.clip_grad=1.0 \
    actor_rollout_ref.actor.megatron.optimizer_offload=$offload \
    actor_rollout_ref.actor.megatron.grad_offload=$offload \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    "${MEGATRON[@]}" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=2 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    +actor_rollout_ref.rollout.data_parallel_size=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.max_num_batched_tokens=$tokens \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$tokens \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=False \
    +reward_model.reward_kwargs.max_resp_len=$max_response_length \
    trainer.logger="['console']" \
    trainer.nnodes=$NNODES \
    trainer.n_gpus_per_node=$NPUS_PER_NODE \
    trainer.save_freq=-1 \
    trainer.test_freq=-1 \
    trainer.val_before_train=False \
    trainer.total_training_steps=300 \
    trainer.use_legacy_worker_impl=enable \
    trainer.device=npu
