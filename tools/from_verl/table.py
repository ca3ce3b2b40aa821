"""Verl's keys and what each is here: the one table, from which the translator works and docs/generated/verl-keys.md is made.

`A.` stands for actor_rollout_ref., `V1.` for trainer.v1. A row may name several keys, each with verl's default behind `=`;
`new|old` are two names of one key; `*` stands for any rest. Defaults are those of verl's main_ppo, those of its others in
OTHER_DEFAULTS.
"""

from tools.from_verl import algorithm, memory
from tools.from_verl import meanings as m
from tools.from_verl.keys import Row, missing, to, unneeded
from tools.from_verl.rollout_table import ROLLOUT
from tools.from_verl.verl_run import ASYNC, ONE_STEP_OFF, SYNC, V1

# fmt: off
TABLE: dict[str, list[Row]] = {
    "Data": [
        to("data.train_files data.val_files", "--train-files, --val-files", "several without brackets", m.files),
        to("data.prompt_key=prompt", "--prompt-key"),
        to("data.max_prompt_length=512", "--max-prompt-length"),
        to("data.max_response_length=512", "--max-response-length"),
        to("data.filter_overlong_prompts=False", "--filter-overlong-prompts"),
        to("data.truncation=error", "--truncation", "verl's `middle` is not here"),
        to("data.shuffle=True", "--shuffle"),
        to("data.seed=null", "--seed", "here also of the sampling; 0 by default"),
        to("data.train_max_samples=-1", "--train-max-samples"),
        to("data.val_max_samples=-1", "--val-max-samples"),
        to("data.train_batch_size=1024 A.actor.ppo_mini_batch_size=256 async_training.require_batches|async.require_batches",
           "--train-batch-size, --ppo-mini-batch-size", "both count prompts over all ranks, as in verl. The batch of "
           "`train_async.py` is verl's `require_batches` times `ppo_mini_batch_size`", m.batch),
        to("data.image_key=images", "--image-key"),
        missing("data.mm_processor_kwargs.min_pixels=null data.mm_processor_kwargs.max_pixels=null",
                "write them into the model's preprocessor_config.json"),
        missing("data.video_key=videos data.audio_key", "only images"),
        to("data.apply_chat_template_kwargs.* data.apply_chat_template_kwargs", "--chat-template-args", "`name=value` each",
           m.chat_template),
        missing("data.custom_cls.* data.sampler.* data.datagen.*", "files are read as verl's parquet files, with one order; "
                "`--map file.py:function` changes rows"),
        missing("data.continuous_token.*", "turns are tokenised one by one, so that none is tokenised again"),
        missing("data.tokenizer=null", "the tokenizer is the model's"),
        missing("data.tool_config_path=null data.function_tool_path=null", "tools are functions: `--tools file.py:f,g`"),
        missing("data.reward_fn_key=data_source", "the column is `data_source`"),
        missing("data.mm_processor_kwargs.* data.mm_processor_kwargs", "edit the model's preprocessor_config.json"),
        unneeded("data.gen_batch_size", "a ticket is one prompt"),
        unneeded("data.val_batch_size", "the validation set is one batch"),
        unneeded("data.return_raw_chat data.return_raw_input_ids data.return_full_prompt", "chats are always templated here"),
        unneeded("data.return_multi_modal_inputs", "learners prepare the pixels of their own micro-batches"),
        unneeded("data.image_patch_size", "the model's own"),
        unneeded("data.dataloader_num_workers data.filter_overlong_prompts_workers data.use_shm", "prompts are measured once"),
        unneeded("data.validation_shuffle", "the order of validation prompts has no effect"),
    ],
    "Model and learner": [
        to("A.model.path", "--model"),
        to("A.model.trust_remote_code|data.trust_remote_code=False", "--trust-remote-code"),
        to("A.model.enable_gradient_checkpointing=True", "--gradient-checkpointing", "on in verl, off here by default"),
        to("A.actor.fsdp_config.dtype|A.actor.megatron.dtype|A.actor.torchtitan.dtype=bfloat16", "--dtype", "`bfloat16` in "
           "verl, `float32` here by default; master weights are fp32 either way", memory.dtype),
        to("A.actor.fsdp_config.param_offload|A.actor.megatron.param_offload|A.actor.veomni.param_offload|"
           "A.actor.torchtitan.param_offload=False "
           "A.actor.fsdp_config.optimizer_offload|A.actor.megatron.optimizer_offload|A.actor.veomni.optimizer_offload|"
           "A.actor.torchtitan.optimizer_offload=False "
           "A.actor.megatron.grad_offload=False A.actor.fsdp_config.offload_policy|A.actor.veomni.enable_fsdp_offload=False "
           "A.actor.optim.override_optimizer_config.optimizer_cpu_offload=False "
           "A.actor.optim.override_optimizer_config.optimizer_offload_fraction=0.0", "--param-offload, --optimizer-offload",
           "the first is parameters, gradients and moments together, the second only moments. Megatron's fraction of 0 "
           "offloads nothing, whatever else is said", memory.offload),
        unneeded("A.ref.fsdp_config.param_offload A.ref.megatron.param_offload A.ref.veomni.param_offload "
                 "A.ref.torchtitan.param_offload A.ref.fsdp_config.offload_policy A.ref.veomni.enable_fsdp_offload",
                 "on an accelerator the reference policy is always in host memory while it is not in use"),
        to("A.actor.optim.lr=1e-6", "--lr"),
        to("A.actor.optim.lr_warmup_steps=-1 A.actor.optim.lr_warmup_steps_ratio=0.0", "--lr-warmup-steps", "training steps, "
           "in both; a ratio is of all steps. None in verl, 10 here by default. The warm-up here is one step ahead: of w steps "
           "the first trains at 1/w of the rate, in verl at 0", m.warmup),
        to("A.actor.optim.lr_scheduler_type|A.actor.optim.warmup_style|A.actor.optim.lr_decay_style|"
           "A.actor.optim.decay_type=constant",
           "--lr-scheduler-type", "`constant` in verl, `cosine` here by default", m.scheduler),
        to("A.actor.optim.min_lr_ratio|A.actor.optim.min_lr_factor=0.0", "--min-lr-ratio"),
        to("A.actor.optim.weight_decay=0.01", "--weight-decay"),
        to("A.actor.optim.betas=[0.9,0.999]", "--adam-beta2", "the first is 0.9", m.betas),
        to("A.actor.grad_clip|A.actor.optim.clip_grad=1.0", "--grad-clip"),
        to("A.actor.ppo_epochs=1", "--ppo-epochs"),
        to("A.actor.use_dynamic_bsz=False A.actor.ppo_max_token_len_per_gpu=16384 A.actor.ppo_micro_batch_size_per_gpu=null "
           "A.actor.ppo_micro_batch_size=null", "--max-tokens-per-micro-batch", "micro-batches are always filled by tokens; a "
           "micro-batch size becomes that many prompts and responses of full length; where verl is given none, which it "
           "refuses, 8,192. At least one full sequence together with `--sequence-parallel`", m.token_budget),
        to("A.actor.ulysses_sequence_parallel_size|A.actor.fsdp_config.ulysses_sequence_parallel_size|"
           "A.actor.veomni.ulysses_parallel_size=1",
           "--sequence-parallel", "a micro-batch has that many times the tokens of one device, as in verl"),
        missing("A.*.megatron.tensor_model_parallel_size=1 A.*.megatron.pipeline_model_parallel_size=1 "
                "A.*.megatron.virtual_pipeline_model_parallel_size=null A.*.megatron.context_parallel_size=1 "
                "A.*.megatron.expert_tensor_parallel_size=1 A.*.megatron.dynamic_context_parallel=False "
                "A.*.torchtitan.tensor_parallel_size=1 A.*.torchtitan.pipeline_parallel_size=1 "
                "A.*.torchtitan.context_parallel_size=1", "the model is sharded over all learners (FSDP2); besides, only "
                "sequences and experts can be divided"),
        to("A.actor.megatron.expert_model_parallel_size|A.actor.veomni.expert_parallel_size|"
           "A.actor.torchtitan.expert_parallel_size=1",
           "--expert-parallel"),
        unneeded("A.ref.ulysses_sequence_parallel_size A.ref.fsdp_config.ulysses_sequence_parallel_size "
                 "A.ref.megatron.expert_model_parallel_size A.ref.*.expert_parallel_size A.ref.*.ulysses_parallel_size",
                 "`--sequence-parallel` and `--expert-parallel` also hold for the reference policy"),
        to("A.model.lora_rank=0 A.model.lora_alpha=16 A.model.target_modules=all-linear A.model.lora_adapter_path=null "
           "A.model.lora.rank=0 A.model.lora.alpha=32 A.model.lora.adapter_path=null A.model.lora.type=lora "
           "A.model.lora.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]",
           "--lora-rank, --lora-alpha, --lora-target", "alpha is 16 in verl, 32 for Megatron and here; "
           "`all-linear` is the decoder's. Megatron's one adapter of `linear_qkv` is three here",
           memory.adapters),
        missing("A.model.exclude_modules=null A.model.lora.exclude_modules=[]", "name the layers that have adapters: "
                "`--lora-target`"),
        missing("A.model.lora.dropout=0.0 A.model.lora.dtype=null", "adapters have no dropout, and are fp32"),
        missing("A.model.enable_activation_offload=False", "`--gradient-checkpointing`, `--sequence-parallel` and a lower "
                "`--max-tokens-per-micro-batch` take less memory"),
        missing("A.model.tiled_mlp.enabled=False", "not for activations within a layer"),
        missing("A.model.custom_chat_template=null", "the chat template is the tokenizer's"),
        missing("A.model.external_lib=null A.model.hf_config_path=null A.model.tokenizer_path=null", "a model is one directory "
                "or hub name"),
        missing("A.model.mtp.enable=False A.rollout.mtp=null", "multi-token prediction"),
        missing("A.model.override_config.* A.model.override_config", "edit the model's config.json"),
        to("A.actor.freeze_vision_tower=False", "--freeze-vision-tower", "verl 1dda039 reads it nowhere"),
        to("A.actor.optim.optimizer|A.actor.optim.name=AdamW", "--optim", "AdamW, or AdamW8bit of torchao or bitsandbytes",
           memory.optimizer),
        missing("A.actor.optim.override_optimizer_config=null A.actor.optim.override_optimizer_config.*", "AdamW as it is"),
        missing("A.actor.optim.lr_warmup_init=0 A.actor.optim.min_lr=0 A.actor.optim.lr_decay_steps=null "
                "A.actor.optim.num_cycles=0.5 A.actor.optim.weight_decay_incr_style|A.actor.optim.wd_incr_style=constant "
                "A.actor.optim.lr_wsd_decay_steps=null A.actor.optim.lr_wsd_decay_style=exponential A.actor.optim.lr_min=0 "
                "A.actor.optim.lr_start=0 A.actor.optim.lr_decay_ratio=1.0 A.actor.optim.init_lr_ratio", "the rate warms up "
                "from 1/w of --lr in the first of w steps to all of it in the last, then stays or falls along half a cosine to "
                "the last step"),
        missing("A.actor.optim.eps=1e-8", "it is 1e-8"),
        missing("A.actor.optim.main_grads_dtype=fp32 A.actor.optim.exp_avg_dtype=fp32 A.actor.optim.exp_avg_sq_dtype=fp32 "
                "A.actor.optim.master_weight_dtype=fp32", "`--optim adamw_8bit` saves memory"),
        unneeded("A.actor.optim.muon_* A.actor.optim.use_layer_wise_distributed_optimizer "
                 "A.actor.optim.use_precision_aware_optimizer A.actor.optim.master_weights "
                 "A.actor.optim.store_param_remainders", "only for optimizers of verl's other engines"),
        to("A.actor.router_replay.mode=disabled A.rollout.enable_rollout_routing_replay=False", "--router-replay", "`off`, "
           "`R2` or `R3`; R3 turns the generator's record on by itself", m.router_replay),
        unneeded("A.actor.megatron.override_transformer_config.moe_router_dtype", "routers compute in fp32"),
        missing("A.ref.router_replay.mode=disabled", "the reference policy chooses its own experts"),
        missing("A.actor.qat.enable=False A.*.fsdp_config.qat.enable=False A.*.megatron.qat.enable=False A.rollout.qat=null "
                "A.*.veomni.qat_implementation=none", "no quantised training"),
        missing("A.ref.model.path", "the reference policy is the starting model"),
        missing("A.actor.fsdp_config.mixed_precision.reduce_dtype=fp32", "gradients are reduced and kept in fp32"),
        missing("A.*.fsdp_config.model_dtype=fp32 A.*.fsdp_config.mixed_precision.*", "master weights are fp32"),
        unneeded("A.hybrid_engine", "it chooses the script: `train_sync.py` is the hybrid one"),
        unneeded("A.actor.strategy A.ref.strategy A.actor.fsdp_config.strategy A.ref.fsdp_config.strategy critic.strategy "
                 "model_engine", "FSDP2 wherever there is something to shard, to cast or to move"),
        unneeded("A.*.use_remove_padding A.*.pad_to_length*", "always packed"),
        unneeded("A.*.use_fused_kernels A.model.fused_kernel_options.* A.model.use_liger A.*.entropy_from_logits* "
                 "A.*.entropy_checkpointing", "log-probs and entropy are always computed in chunks"),
        unneeded("A.model.override_config.*dropout A.model.override_config.*_pdrop", "dropout is always off"),
        unneeded("A.model.override_config.model_config.max_position_embeddings A.model.override_config.max_position_embeddings",
                 "prompt and response must fit the model's own context; to lengthen it edit its config.json"),
        unneeded("A.model.override_config.attn_implementation", "attention is chosen by the device"),
        unneeded("A.model.lora.*", "adapters start from peft's initial values; engines get merged weights"),
        unneeded("A.model.use_shm A.model.mtp.* A.model.tiled_mlp.* A.actor.qat.* A.*.fsdp_config.qat.* "
                 "A.*.fsdp_config.turbo_config.* A.*.router_replay.*", "it only matters with features that are not here"),
        unneeded("A.actor.use_prefix_grouper", "each prompt is computed once in a micro-batch, always"),
        unneeded("A.*.fsdp_config.*", "sharded over all learners, layer by layer"),
        unneeded("A.*.use_torch_compile", "`--compile` compiles the learner's layers"),
        unneeded("A.ref.log_prob_* A.rollout.log_prob_*", "log-probs are computed in the learner's micro-batches"),
        unneeded("A.actor.shuffle A.actor.data_loader_seed A.*.fsdp_config.seed A.*.fsdp_config.full_determinism",
                 "mini-batches keep the batch's order"),
        unneeded("A.*.megatron.* A.*.veomni.* A.*.torchtitan.* A.*.automodel.*", "of verl's other engines; FSDP2 here, and "
                 "their recomputation is `--gradient-checkpointing`"),
        unneeded("A.ref.fsdp_config.optimizer_offload A.ref.fsdp_config.dtype A.ref.optim.*", "the reference policy has no "
                 "optimizer"),
        unneeded("A.actor.optim.zero_indexed_step", "verl's count from 0 (True) makes its warm-up one step later than the one "
                 "here; from 1 (False) its warm-up is the one here"),
        unneeded("A.actor.optim.total_training_steps A.actor.optim.optimizer_impl "
                 "A.actor.optim.use_checkpoint_opt_param_scheduler", "the scripts set it"),
        unneeded("A.actor.optim.override_optimizer_config.overlap_* "
                 "A.actor.optim.override_optimizer_config.use_precision_aware_optimizer", "speed and precision of Megatron's "
                 "optimizer"),
        unneeded("A.actor.checkpoint.* A.*.load_weight", "a checkpoint holds all that a run needs to resume "
                 "(checkpoints.md)"),
        unneeded("A.nccl_timeout", "every wait is watched: `--hang-timeout`"),
        unneeded("A.actor.rollout_n A.ref.rollout_n", "`--rollout-n`"),
    ],
    "Algorithm": [
        to("algorithm.adv_estimator=gae algorithm.norm_adv_by_std_in_grpo=True", "--adv-estimator", "verl's words work; `gae` "
           "is verl's default. Without division by the standard deviation `grpo` is `dr_grpo`", algorithm.estimator),
        to("algorithm.gdpo_reward_keys", "--gdpo-reward-keys", "names without brackets; of the fork `gdpo`",
           algorithm.gdpo_keys),
        to("algorithm.gdpo_reward_weights", "--gdpo-reward-weights", "of the fork `gdpo`", algorithm.gdpo_weights),
        to("algorithm.gamma=1.0", "--gamma"),
        to("A.actor.policy_loss.loss_mode=vanilla", "--loss-mode", "verl's words work"),
        to("A.actor.loss_agg_mode=token-mean", "--loss-agg-mode", "`token-mean` in verl; here that of the loss's paper by "
           "default. Denominators are global; `geo_mean`, `sapo` and `gspo` are `seq-mean-token-mean` in both; only verl 0.9.1 "
           "aggregates `gspo` as this key says", algorithm.aggregation),
        to("A.actor.clip_ratio_low=0.2 A.actor.clip_ratio_high=0.2 A.actor.clip_ratio=0.2", "--clip-ratio-low, "
           "--clip-ratio-high", "`clip_ratio` is both; 0.2 in verl for every loss, here that of the loss's paper",
           algorithm.clips),
        to("A.actor.clip_ratio_c=3.0", "--clip-ratio-c", "in verl for `dppo_tv` and `dppo_kl`, too; there 20 here by default, "
           "the paper's", algorithm.dual_clip),
        to("A.actor.entropy_coeff=0.0", "--entropy-coeff"),
        to("A.actor.use_kl_loss=False A.actor.kl_loss_coef=0.001 A.actor.kl_loss_type=low_var_kl", "--use-kl-loss, "
           "--kl-loss-coef, --kl-loss-type", "`low_var_kl` is `k3`: both work", algorithm.kl_loss),
        to("algorithm.use_kl_in_reward=False algorithm.kl_penalty=kl algorithm.kl_ctrl.type=fixed "
           "algorithm.kl_ctrl.kl_coef=0.001 algorithm.kl_ctrl.target_kl=0.1 algorithm.kl_ctrl.horizon=10000",
           "--use-kl-in-reward, --kl-reward-type, --kl-reward-coef", "`adaptive` needs the fork `adaptive_kl`, which adds "
           "`--target-kl` and `--kl-horizon`",
           algorithm.kl_in_reward),
        to("algorithm.rollout_correction|async_training.rollout_correction|async.rollout_correction=null "
           "algorithm.rollout_correction.rollout_is=null algorithm.rollout_correction.rollout_is_threshold=2.0 "
           "algorithm.rollout_correction.rollout_is_batch_normalize=False algorithm.rollout_correction.rollout_rs=null "
           "algorithm.rollout_correction.rollout_rs_threshold=null", "--rollout-is, --rollout-is-threshold, "
           "--rollout-is-batch-normalize, --rollout-rs, --rollout-rs-threshold", "verl's words for a whole correction, such as "
           "`token_tis` or `decoupled_geo_rs_seq_tis`, become the flags that they stand for", algorithm.correction),
        to("algorithm.rollout_correction.bypass_mode=False "
           "A.actor.use_rollout_log_probs|async_training.use_rollout_log_probs|async.use_rollout_log_probs=False",
           "--use-rollout-log-probs", "on by default where batches may be stale, as in verl", algorithm.old_log_probs),
        to("algorithm.filter_groups.enable=False algorithm.filter_groups.max_num_gen_batches=0 "
           "algorithm.filter_groups.metric=reward", "--filter-groups, --max-num-gen-batches", "by the score without the "
           "penalty on length, as verl's `acc`; its `reward` is the same without an overlong buffer; 0 is no limit in verl",
           algorithm.filter_groups),
        missing("algorithm.rollout_correction.loss_type=ppo_clip", "`--loss-mode reinforce` with `--rollout-is`"),
        missing("algorithm.rollout_correction.rollout_rs_threshold_lower=null algorithm.rollout_correction.use_policy_gradient "
                "algorithm.rollout_is algorithm.rollout_is_threshold algorithm.rollout_is_level algorithm.rollout_is_mode "
                "algorithm.rollout_correction.rollout_token_veto_threshold", "older words of verl, for which see "
                "`algorithm.rollout_correction`"),
        to("algorithm.lam=1.0 critic.optim.lr=1e-5 critic.ppo_epochs=null critic.cliprange_value=0.5 critic.model.path=null "
           "trainer.critic_warmup=0", "--lam, --critic-lr, --critic-ppo-epochs, --cliprange-value, --critic-model, "
           "--critic-warmup", "only with `gae`. verl's warm-up of n holds n - 1 steps, here n; null epochs are the policy's",
           algorithm.critic),
        missing("algorithm.use_pf_ppo=False algorithm.pf_ppo.*", "PF-PPO"),
        missing("algorithm.filter_groups.max_inflight_gen_batches=1", "one batch at a time"),
        to("A.actor.policy_loss.clip_cov_ratio=0.0002 A.actor.policy_loss.clip_cov_lb=1.0 A.actor.policy_loss.clip_cov_ub=5.0 "
           "A.actor.policy_loss.kl_cov_ratio=0.0002 A.actor.policy_loss.ppo_kl_coef=0.1 "
           "A.actor.tau_pos|A.actor.policy_loss.tau_pos=1.0 A.actor.tau_neg|A.actor.policy_loss.tau_neg=1.05 "
           "A.actor.policy_loss.dro_beta=null", "--loss-args", "`clip_cov`: ratio, low, high; `kl_cov`: ratio, coef (0.1 in "
           "verl, the paper's 1 here); `sapo`: tau_pos, tau_neg; `dro`: beta", algorithm.loss_args),
        missing("A.actor.loss_scale_factor=null", "`seq-mean-token-sum-norm` divides by the response budget"),
        to("distillation.enabled=False distillation.teacher_models.*.model_path "
           "distillation.distillation_loss.use_task_rewards=True distillation.distillation_loss.distillation_loss_coef=1.0 "
           "distillation.distillation_loss.loss_mode=k3 distillation.distillation_loss.topk=32 "
           "distillation.distillation_loss.use_policy_gradient=False", "--teacher, --teacher-alone, --teacher-coef, "
           "--teacher-top-k", "the teacher is on the learners. `k1` by policy gradient and `k2` as a loss are the same here; "
           "`forward_kl_topk` becomes the reverse KL", algorithm.distillation),
        missing("distillation.distillation_loss.kd_temperature=1.0", "the teacher's temperature is `--temperature`, too"),
        missing("distillation.distillation_loss.loss_max_clamp=null distillation.distillation_loss.log_prob_min_clamp=null",
                "no clamp"),
        missing("distillation.*", "one teacher, on the learners, without an engine of its own"),
        missing("critic.*", "but for the flags above the critic has the policy's flags"),
        unneeded("critic.enable", "with `--adv-estimator gae`"),
        unneeded("critic.ppo_m* critic.*micro_batch_size* critic.*max_token_len_per_gpu critic.use_dynamic_bsz "
                 "critic.*offload* critic.model.enable_gradient_checkpointing critic.model.use_remove_padding "
                 "critic.model.tokenizer_path "
                 "critic.ulysses_sequence_parallel_size critic.*.fsdp_size critic.model.trust_remote_code critic.checkpoint.* "
                 "critic.rollout_n critic.shuffle", "the policy's flags for memory and batches hold for the critic, too"),
        unneeded("distillation.n_gpus_per_node distillation.nnodes distillation.teacher_models.*.inference.* "
                 "distillation.teacher_models.*.num_replicas", "the teacher is on the learners"),
        unneeded("distillation.teacher_key distillation.teacher_models.*.key", "one teacher reads every sample"),
        unneeded("distillation.distillation_loss.use_chunked_topk distillation.distillation_loss.chunked_topk_chunk_size",
                 "log-probs are always computed in chunks"),
        unneeded("A.actor.calculate_entropy", "the entropy is always measured"),
        unneeded("A.actor.calculate_sum_pi_squared", "measured where the estimator asks for it"),
    ],
    "Reward": [
        to("reward.custom_reward_function.path|custom_reward_function.path=null "
           "reward.custom_reward_function.name|custom_reward_function.name=compute_score", "--reward", "`path.py:name`, called "
           "with the same arguments", m.own_reward),
        to(
           "reward.reward_kwargs.overlong_buffer_cfg.enable|reward_model.reward_kwargs.overlong_buffer_cfg.enable|"
           "reward_model.overlong_buffer.enable=False "
           "reward.reward_kwargs.overlong_buffer_cfg.len|reward_model.reward_kwargs.overlong_buffer_cfg.len|"
           "reward_model.overlong_buffer.len=0 "
           "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor|"
           "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor|reward_model.overlong_buffer.penalty_factor=1.0 "
           "reward.reward_kwargs.max_resp_len|reward_model.reward_kwargs.max_resp_len=null", "--overlong-buffer-len, "
           "--overlong-penalty-factor", "a length of 0 is off; the response budget is `--max-response-length`. In verl it "
           "only acts with the manager `dapo`", m.overlong),
        to("reward.reward_manager.name|reward_model.reward_manager=naive", "", "the verifier is chosen by `data_source`; "
           "`naive`, `dapo` and `prime` score alike here; a function of `batch` takes lists: write it for one response, or for "
           "a group with the fork `group_reward`", m.reward_manager),
        missing("reward.reward_model.enable|reward_model.enable=False", "a model that scores is served apart: "
                "`--reward examples/judge.py:judge`"),
        missing("reward_model.reward_kwargs.* reward.reward_kwargs.* custom_reward_function.reward_kwargs.* "
                "reward.custom_reward_function.reward_kwargs.*", "write them into your function"),
        missing("reward.reward_manager.source=register reward.reward_manager.module.*", "write what it does into --reward"),
        unneeded("sandbox_fusion.* reward.sandbox_fusion.* reward_model.sandbox_fusion.*", "programs run in a sandbox of each "
                 "rank's own, with 1 GiB; `--reward-workers` for several"),
        unneeded("reward.reward_kwargs.overlong_buffer_cfg.log reward_model.reward_kwargs.overlong_buffer_cfg.log "
                 "reward_model.overlong_buffer.log", "the penalty is always a metric"),
        unneeded("reward.num_workers reward_model.num_workers reward_model.launch_reward_fn_async", "`--reward-workers` a "
                 "rank"),
        missing("reward_model.* reward.reward_model.*", "of the model that scores, which is served apart: "
                "`--reward examples/judge.py:judge`",
                switch="reward.reward_model.enable"),
    ],
    **ROLLOUT,
    "Trainer": [
        to("trainer.total_epochs|rollout.total_epochs=30 trainer.total_training_steps=null rollout.total_rollout_steps=null",
           "--total-epochs, --total-training-steps, --total-rollout-steps", "`total_rollout_steps` counts prompts: the smaller "
           "of it and the epochs ends a fully async run. `total_training_steps` overrules both here; in verl epochs may still "
           "end the run earlier. A step may reach from one epoch into the next, where verl drops the rest of an epoch",
           m.length),
        to("trainer.test_freq|rollout.test_freq=-1", "--test-freq", "in steps; verl's fully async mode counts publishes: times "
           "`--publish-every`. -1 in verl, 0 here is never", m.test_freq),
        to("trainer.val_before_train=True", "--val-before-train"),
        to("trainer.save_freq=-1", "--save-freq", "as `--test-freq`; there is always a checkpoint at the end", m.save_freq),
        to("trainer.max_actor_ckpt_to_keep=null", "--max-ckpt-to-keep", "verl keeps all, here 3 by default; 0 keeps all",
           m.keep),
        to("trainer.resume_mode=auto trainer.resume_from_path=null", "--resume-mode", "`auto`, `disable` or the path of a "
           "checkpoint of ours: verl's cannot be read. auto needs the same `--experiment-name`", m.resume),
        to("trainer.default_local_dir", "--output-dir", "the run's directory is made in it"),
        to("trainer.project_name", "--project-name"),
        to("trainer.experiment_name", "--experiment-name"),
        to("trainer.logger=[console,wandb]", "--logger", "all but `file`, `vemlp_wandb`, `clearml`", m.logger),
        to("trainer.log_val_generations", "--log-val-generations", "in a table of the loggers; 8 by default here"),
        to("trainer.val_only=False", "--val-only", "of `--model`, which may be a checkpoint's directory"),
        missing("trainer.default_hdfs_dir=null", "no HDFS"),
        missing("trainer.rollout_data_dir=null", "`--record-samples all` keeps every sample, as tokens"),
        unneeded("trainer.validation_data_dir", "`val_generations/` in the run's directory has every response"),
        missing("trainer.checkpoint_callback_class=null", "call it in your copy of the script"),
        missing("A.*.profile.* A.profiler.* global_profiler.* A.*.profiler.* trainer.profile_steps=null "
                "trainer.*_nsight_options.* trainer.npu_profile.*",
                "profile a script as any other Python program"),
        unneeded("trainer.max_critic_ckpt_to_keep", "a checkpoint holds the critic, too"),
        unneeded("trainer.balance_batch", "micro-batches are always balanced over the ranks"),
        unneeded("trainer.device", "what the machine has"),
        unneeded("trainer.use_legacy_worker_impl", "there is one implementation"),
        unneeded("trainer.del_local_ckpt_after_load trainer.esi_redundant_time trainer.ray_wait_register_center_timeout",
                 "there is no such thing"),
        unneeded("ray_kwargs.* ray_init.* ray_kwargs ray_init transfer_queue.* hydra.* skip.*", "no Ray, no Hydra"),
    ],
}

# What verl's own configurations of its other two programs set otherwise.
_SPLIT = {"algorithm.rollout_correction.bypass_mode": True}
OTHER_DEFAULTS: dict[str, dict[str, object]] = {
    SYNC: {},
    ONE_STEP_OFF: _SPLIT,
    ASYNC: _SPLIT
    | {
        "actor_rollout_ref.actor.use_rollout_log_probs": True,
        "async_training.staleness_threshold": 0.1,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": True,
        "rollout.total_rollout_steps": 100,
    },
    V1: {  # separate_async of its newer trainer
        f"{V1}trainer_mode": "separate_async",
        f"{V1}sampler.max_off_policy_threshold": 8,
        "async_training.staleness_threshold": 1.0,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": True,
    },
}
# fmt: on

ROWS = [row for section in TABLE.values() for row in section]
