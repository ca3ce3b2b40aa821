"""The rows of verl's keys for its engines and for training asynchronously: a part of table.py, which explains them."""

from tools.from_verl import meanings as m
from tools.from_verl import split
from tools.from_verl.keys import Row, missing, to, unneeded

# fmt: off
ROLLOUT: dict[str, list[Row]] = {
    "Rollout": [
        to("A.rollout.name=vllm", "--engine", "`vllm` or the embedded engine; not `sglang`", m.engine),
        to("A.rollout.n=1", "--rollout-n", "1 in verl, 8 here by default"),
        to("A.rollout.temperature=1.0", "--temperature"),
        to("A.rollout.top_p=1.0", "--top-p"),
        to("A.rollout.top_k=-1", "--top-k", "-1 or 0 is off in verl, -1 here", m.top_k),
        to("A.rollout.min_p=0.0", "--min-p"),
        missing("A.rollout.ignore_eos=False", "a response ends at its end token"),
        to("A.rollout.val_kwargs.n=1", "--val-n"),
        to("A.rollout.val_kwargs.do_sample A.rollout.val_kwargs.temperature=0.0 A.rollout.val_kwargs.top_p=1.0 "
           "A.rollout.val_kwargs.top_k=-1", "--val-temperature, --val-top-p", "`do_sample=False` is temperature 0; no top_k in "
           "the validation", m.validation),
        to("A.rollout.tensor_model_parallel_size=2", "--rollout-tp", "2 in verl, 1 here by default"),
        to("A.rollout.gpu_memory_utilization=0.5 A.rollout.standalone_gpu_memory_utilization=null", "--gpu-memory-utilization",
           "the second in verl's fully async mode", m.gpu_memory),
        to("A.rollout.max_num_seqs=256", "--max-num-seqs"),
        to("A.rollout.max_num_batched_tokens=8192", "--max-num-batched-tokens"),
        unneeded("A.rollout.enable_chunked_prefill", "vLLM splits long prompts over several steps, except on a CPU"),
        to("A.rollout.enforce_eager=False", "--enforce-eager"),
        unneeded("A.rollout.load_format", "the learner's weights come in any case"),
        unneeded("A.rollout.free_cache_engine|A.rollout.enable_sleep_mode", "the engine of `train_sync.py` frees its memory "
                 "while the learner works; a generator's keeps it"),
        to("A.rollout.dtype=bfloat16", "--rollout-dtype", "by default that of `--dtype`", m.rollout_dtype),
        missing("A.rollout.pipeline_model_parallel_size=1", "an engine is only split by tensor parallelism"),
        missing("A.rollout.data_parallel_size=1", "each `--rollout-tp` ranks are an engine of their own; none shares experts "
                "with another"),
        missing("A.rollout.expert_parallel_size=1", "experts are split by tensor parallelism, as everything else"),
        missing("A.rollout.engine_kwargs.*", "other vLLM settings have no flags"),
        to("A.rollout.multi_turn.max_assistant_turns=null A.rollout.multi_turn.format=hermes", "--max-turns, --tool-format",
           "8 turns by default; only with `--env` or `--tools`", m.turns),
        missing("A.rollout.multi_turn.enable=False A.rollout.agent.default_agent_loop=single_turn_agent "
                "A.rollout.agent.agent_loop_config_path=null A.rollout.multi_turn.tool_config_path=null "
                "A.rollout.multi_turn.function_tool_path=null A.rollout.multi_turn.interaction_config_path=null",
                "verl's classes of tools, interactions and agent loops: write functions (`--tools`), an environment (`--env`) "
                "or an agent (`--agent`, `--serve-policy`), agents.md"),
        missing("A.rollout.quantization=null A.rollout.quantization_config_file=null", "no quantised engine"),
        missing("A.rollout.repetition_penalty=1.0", "a fork: examples/forks/repetition_penalty.diff"),
        missing("A.rollout.do_sample=True", "a rollout always samples"),
        missing("A.rollout.over_sample_rate=0", "verl drops what it does not wait for; `--over-sample` continues it in the "
                "next step"),
        missing("A.rollout.disaggregation.enabled=False", "prefill and decoding on the same devices"),
        missing("A.rollout.skip.* A.rollout.skip_rollout=False A.rollout.skip_dump_dir", "`--record-samples all` writes "
                "them, and replay.py trains on them"),
        unneeded("A.rollout.layer_name_map.*", "of verl's conversion from Megatron"),
        missing("A.rollout.trace.* A.rollout.prometheus.*", "metrics go where `--logger` says"),
        unneeded("A.rollout.engine_kwargs.vllm.mm_processor_cache_gb "
                 "A.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache A.rollout.limit_images", "images come to vLLM as "
                 "prepared pixels, any number of them"),
        unneeded("A.rollout.mode A.rollout.router_config_path", "a generator draws the next prompt when it has room"),
        unneeded("A.rollout.max_model_len A.rollout.prompt_length A.rollout.response_length", "prompt and response budget "
                 "together"),
        unneeded("A.rollout.calculate_log_probs A.rollout.logprobs_mode", "log-probs always come with the tokens"),
        unneeded("A.rollout.layered_summon", "weights are gathered one by one, always"),
        unneeded("A.rollout.enable_prefix_caching A.rollout.scheduling_policy A.rollout.cudagraph_capture_sizes "
                 "A.rollout.disable_log_stats A.rollout.skip_tokenizer_init A.rollout.multi_stage_wake_up A.rollout.seed "
                 "A.rollout.full_determinism A.rollout.use_inflight_load_balancing", "the engine is set up so or has no such "
                 "thing"),
        unneeded("A.rollout.checkpoint_engine.* A.checkpoint_engine A.rollout.update_weights_bucket_megabytes "
                 "A.rollout.moe_load_balance_metrics_interval", "weights are broadcast over the job's own process group"),
        unneeded("A.rollout.disaggregation.* A.rollout.use_dynamic_bsz", "it only matters with features that are not here"),
        unneeded("A.rollout.agent.num_workers A.rollout.agent.* A.rollout.multi_turn.*", "an environment limits what it "
                 "answers; all calls of a turn are made"),
    ],
    "Asynchronous training": [
        to("async_training.staleness_threshold|async.staleness_threshold|V1.separate_async.num_warmup_batches",
           "--staleness-threshold"),
        to("async_training.trigger_parameter_sync_step|async.trigger_parameter_sync_step|V1.separate_async.parameter_sync_step",
           "--publish-every"),
        to("async_training.partial_rollout|async.partial_rollout", "--partial-rollout", "True is `recompute`: a response goes "
           "on with a fresh KV cache; `keep`, the default here, spares the time for it. False is `off`", split.partial_rollout),
        to("V1.sampler.max_off_policy_threshold=null V1.sampler.max_off_policy_strategy=drop", "--max-staleness",
           "verl counts the versions that a response spans, `--max-staleness` the age of its oldest token: one less. null is "
           "no bound", split.off_policy),
        to("V1.colocate_async.num_warmup_batches=1.0", "--over-sample", "with `trainer_mode=colocate_async`: unfinished "
           "responses continue in the next step", split.over_sample),
        to("V1.trainer_mode=sync", "", "`sync` and `colocate_async` are `train_sync.py`, `separate_async` is `train_async.py`, "
           "whose steps are mini-batches: what verl counts in publishes is multiplied", split.trainer_mode),
        missing("V1.separate_async.hybrid_rollout.enable_switch=False async_training.use_dynamic_resource_scheduling=False "
                "async.use_dynamic_resource_scheduling=False", "learners never generate; plan.py finds the best split"),
        missing("V1.sampler.custom_sampler.* V1.sampler.sampler_kwargs", "the order of prompts is one seeded permutation"),
        unneeded("trainer.use_v1 V1.sync V1.*", "only in verl's newer trainer"),
        unneeded("V1.sampler.sync_refill_failed_groups", "a response that could not be scored is left out, and counted"),
        to("trainer.nnodes=1 trainer.n_gpus_per_node=8 rollout.nnodes|A.rollout.nnodes=1 "
           "rollout.n_gpus_per_node|A.rollout.n_gpus_per_node=8 A.rollout.n_gpus|rollout.n_gpus=null", "--generators",
           "torchrun's `--nnodes` and `--nproc-per-node` are the sum; every node both generates and learns, with "
           "`--generators` of its ranks generating; roles of their own: nodes.md. `n_gpus` alone is a part of the trainer's "
           "devices", split.devices),
        missing("rollout.n", "verl itself reads `A.rollout.n`"),
        missing("async_training.compute_prox_log_prob=False async.compute_prox_log_prob=False", "`--loss-mode decoupled_ppo` "
                "computes it"),
        unneeded("async_training.use_trainer_do_validate async.use_trainer_do_validate "
                 "async_training.parallel_validate_and_rollout async.parallel_validate_and_rollout", "the generators validate"),
        unneeded("async_training.checkpoint_engine.* async.checkpoint_engine.*", "weights are broadcast over the job's own "
                 "process group"),
        unneeded("rollout.max_concurrent_samples_per_replica async_training.concurrent_samples_per_replica "
                 "async_training.dynamic_schedule_*", "as many as the engine takes: `--max-num-seqs`"),
        unneeded("A.rollout.total_rollout_steps", "verl reads `rollout.total_rollout_steps`"),
    ],
}
# fmt: on
