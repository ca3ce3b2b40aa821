"""Flags that have no effect with the other flags: one warning names each and the flag it needs. With that flag there is no
warning.

CASES is written by hand, apart from the table of rl/flag_needs.py: for each flag a command line that lacks what the flag needs,
and one that has it. A new flag has to be entered here, too: in CASES, or in ALWAYS with its component.
"""

import dataclasses
import re

import pytest
from helpers import ROOT, train

import losses
import plan
import train_async
import train_one_step_off
import train_sync
from rl import flag_needs, flags, parts

RUBRIC = ROOT / "examples" / "rubric.yaml"
SCRIPTS = {"sync": train_sync.Args, "one_step_off": train_one_step_off.Args, "async": train_async.Args}
PLAN = dataclasses.make_dataclass("Args", [], bases=(plan.PlanArgs, train_async.Args))
ALONE = "--teacher demo --teacher-alone --teacher-top-k 4"
TRL = f"{__file__}:over_environments"
IN_POOL = ("--reward-timeout 5", "--reward-cpu-limit 5", "--reward-workers 2", "--reward-memory-limit-gb 2")
IN_POOL += ("--reward-concurrency 8",)
WITH = {"target_kl": {"kl_ctrl_type"}, "gamma": {"adv_estimator"}, "loss_args": {"loss_mode"}}  # named next to a flag
WITH |= {"rollout_is_threshold": {"rollout_is"}}
# a flag with a value; other flags with which it has no effect; others with which it has one; the script
CASES = [
    ("--gamma 0.9", "--adv-estimator grpo", "--adv-estimator reinforce_pp"),
    ("--gamma 0.9", "--adv-estimator remax", "--adv-estimator reinforce_plus_plus"),
    ("--gamma 0.9", "--adv-estimator rloo", "--adv-estimator gae"),
    ("--clip-ratio-low 0.1", "--loss-mode sapo", "--loss-mode gspo"),
    ("--clip-ratio-low 0.1", "--loss-mode kl_cov", "--loss-mode clip_cov"),
    ("--clip-ratio-high 0.1", "--loss-mode reinforce", "--loss-mode cispo"),
    ("--clip-ratio-high 0.1", "--loss-mode gpg", "--loss-mode geo_mean"),
    ("--clip-ratio-c 10", "--loss-mode gspo", "--loss-mode vanilla"),
    ("--clip-ratio-c 10", "--loss-mode clip_cov", "--loss-mode dppo_tv"),
    ("--kl-loss-coef 0.1", "", "--use-kl-loss"),
    ("--kl-loss-coef 0.001", "--no-use-kl-loss", "--use-kl-loss True"),
    ("--kl-loss-type k1", "", "--use-kl-loss"),
    ("--kl-reward-type k2", "--use-kl-loss", "--use-kl-in-reward"),
    ("--kl-ctrl-type adaptive", "", "--use-kl-in-reward"),
    ("--kl-ctrl-type fixed", "", "--use-kl-in-reward"),
    ("--kl-reward-coef 0.1", "", "--use-kl-in-reward"),
    ("--target-kl 0.2", "--kl-ctrl-type adaptive", "--kl-ctrl-type adaptive --use-kl-in-reward"),
    ("--target-kl 0.2", "--use-kl-in-reward", "--kl-ctrl-type adaptive --use-kl-in-reward"),
    ("--kl-horizon 5", "", "--kl-ctrl-type adaptive --use-kl-in-reward"),
    ("--max-num-gen-batches 3", "", "--filter-groups"),
    ("--teacher-coef 2", "", "--teacher demo"),
    ("--sft-coef 2", "", "--sft-files demo"),
    ("--sft-batch-size 2", "", "--sft-files demo"),
    ("--teacher-top-k 4", "--use-kl-loss", "--teacher demo"),
    ("--teacher-prompt {prompt}", "", "--teacher demo"),
    ("--teacher-max-prompt-length 9", "--teacher demo", "--teacher demo --teacher-prompt {prompt}"),
    ("--critic-model demo", "", "--adv-estimator gae"),
    ("--critic-lr 0.1", "", "--adv-estimator gae"),
    ("--critic-ppo-epochs 2", "", "--adv-estimator gae"),
    ("--critic-warmup 5", "", "--adv-estimator gae"),
    ("--critic-lam 1", "", "--adv-estimator gae"),
    ("--entropy-coeff-delta 0.1", "--entropy-coeff 0.1", "--entropy-target 0.5"),
    ("--entropy-coeff-max 0.1", "", "--entropy-target 0.5"),
    ("--lam 0.9", "--adv-estimator reinforce_pp", "--adv-estimator gae"),
    ("--cliprange-value 0.2", "", "--adv-estimator gae"),
    ("--rollout-is-threshold 3", "", "--rollout-is token"),
    ("--rollout-is-threshold 3", "--rollout-rs seq_mean_k1 --rollout-rs-threshold 2", "--rollout-is token"),
    ("--rollout-is-batch-normalize", "--rollout-rs seq_mean_k1 --rollout-rs-threshold 2", "--rollout-is sequence"),
    ("--rollout-rs-threshold 0.1", "", "--rollout-rs token_k2"),
    ("--rollout-rs-threshold 0.9_1.1", "--rollout-is token", "--rollout-rs seq_mean_k1"),
    ("--total-epochs 3", "--total-training-steps 9", ""),
    ("--total-rollout-steps 3", "--total-training-steps 9", "--total-epochs 1"),
    ("--val-before-train", "--test-freq 0", "--test-freq 5"),
    ("--val-files a", "--test-freq -1", "--test-freq 5"),
    ("--val-max-samples 8", "--test-freq 0", "--test-freq 5"),
    ("--log-val-generations 8", "--test-freq 0", "--test-freq 5"),
    ("--val-n 8", "--test-freq 0", ""),
    ("--val-temperature 1", "--test-freq -1", ""),
    ("--val-top-p 0.7", "--test-freq 0", "--val-temperature 1"),
    ("--val-top-p 0.7", "", "--val-temperature 1"),
    ("--truncation left", "--filter-overlong-prompts", ""),
    ("--adv-estimator rloo", ALONE, "--teacher demo --teacher-top-k 4"),
    ("--adv-estimator rloo", "--teacher demo --teacher-alone", f"{ALONE} --use-kl-in-reward"),
    ("--adv-estimator dr_grpo", f"{ALONE} --loss-agg-mode token-mean", ALONE),
    ("--gamma 0.9", f"{ALONE} --adv-estimator reinforce_pp", "--adv-estimator reinforce_pp"),
    ("--loss-mode cispo", ALONE, "--teacher demo --teacher-alone"),
    ("--loss-mode cispo", ALONE, f"{ALONE} --use-kl-in-reward"),
    ("--loss-mode sapo", f"{ALONE} --loss-agg-mode token-mean", ALONE),
    ("--top-entropy-quantile 0.2", ALONE, "--teacher demo --teacher-top-k 4"),
    ("--top-entropy-quantile 0.2", ALONE, f"{ALONE} --loss-mode dro"),
    ("--loss-args cap=3", f"{ALONE} --loss-mode decoupled_ppo", "--loss-mode decoupled_ppo"),
    ("--off-policy-mask-threshold 0.1", ALONE, "--teacher demo --teacher-alone"),
    ("--rollout-is token", ALONE, "--teacher demo --teacher-alone"),
    ("--rollout-is-threshold 3", f"{ALONE} --rollout-is token", "--rollout-is token"),
    ("--clip-ratio-low 0.1", ALONE, "--teacher demo --teacher-alone"),
    ("--clip-ratio-high 0.1", ALONE, "--teacher demo --teacher-top-k 4"),
    ("--clip-ratio-c 5", ALONE, ""),
    *[(flag, f"--env demo-calculator --reward {TRL}", f"--reward {__file__}:look") for flag in IN_POOL],
    ("--reward-concurrency 8", "", f"--reward {__file__}:look"),
    ("--judge-url http://x", "", f"--judge {RUBRIC}"),
    ("--judge-model x", "", f"--judge {RUBRIC}"),
    ("--judge-retries 1", "", f"--judge {RUBRIC}"),
    ("--gdpo-reward-keys a b", "", "--adv-estimator gdpo"),
    ("--gdpo-reward-weights 1 2", "", "--adv-estimator gdpo --gdpo-reward-keys a b"),
    ("--overlong-penalty-factor 2", "", "--overlong-buffer-len 4"),
    ("--max-turns 3", "", "--env demo-calculator"),
    ("--tool-format xml", "", "--env demo-calculator"),
    ("--turn-rewards", "--adv-estimator reinforce_pp", "--env demo-calculator --adv-estimator reinforce_pp"),
    ("--turn-rewards", "--env demo-calculator", "--env demo-calculator --adv-estimator remax"),
    ("--turn-rewards", "--env demo-calculator --adv-estimator rloo", "--env demo-calculator --adv-estimator gae"),
    ("--env-timeout 3", "", "--env demo-calculator"),
    ("--env-cpu-limit 3", "", "--env demo-calculator"),
    ("--env-memory-limit-gb 3", "", "--env demo-calculator"),
    ("--env-lock-step on", "", "--env demo-calculator"),
    ("--serve-host 0.0.0.0", "--agent python", "--serve-policy 8000"),
    ("--gpu-memory-utilization 0.8", "--engine embedded", "--engine vllm"),
    ("--enable-chunked-prefill", "--engine embedded", "--engine vllm"),
    ("--enforce-eager", "--engine embedded", "--engine vllm"),
    ("--load-format dummy", "--engine embedded", "--engine vllm"),
    ("--free-cache-engine", "--engine embedded", "--engine vllm"),
    ("--ref-offload", "", "--use-kl-in-reward"),
    ("--ref-offload", "--lora-rank 8 --use-kl-loss", "--use-kl-loss"),
    ("--lora-alpha 16", "", "--lora-rank 8"),
    ("--lora-target q_proj", "--lora-rank 0", "--lora-rank 8"),
    ("--publish adapter", "", "--lora-rank 8"),
    ("--min-lr-ratio 0.1", "--lr-scheduler-type constant", "--lr-scheduler-type cosine"),
    ("--project-name x", "--logger console tensorboard", "--logger wandb"),
    ("--push-to me/model", "--val-only", ""),
    ("--resume-anyway", "", "--experiment-name x"),
    ("--resume-anyway", "--resume-mode disable --experiment-name x", "--resume-mode runs/x/step_000002"),
    ("--partial-rollout recompute", "--staleness-threshold 0", "--staleness-threshold 0.5", "async"),
    ("--partial-rollout keep", "--staleness-threshold 0", "--publish-every 2", "async"),
    ("--on-stale wait", "", "--max-staleness 2", "async"),
]
BY_SCRIPT = {"free_cache_engine"}
ALWAYS = {  # component -> its flags that have an effect by themselves, or are refused where they cannot have one
    "RunArgs": "model trust_remote_code seed total_training_steps test_freq val_only",
    "TeacherArgs": "teacher teacher_alone",
    "JudgeArgs": "judge",
    "ImitationArgs": "sft_files",
    "AlgorithmArgs": "loss_agg_mode backward_without_advantage use_kl_loss score_centering "
    "use_kl_in_reward use_rollout_log_probs filter_groups",
    "EntropyArgs": "entropy_coeff entropy_target",
    "RolloutCorrectionArgs": "rollout_rs",
    "DataArgs": "image_key min_pixels max_pixels prompt_sampling "
    "train_files prompt_key max_prompt_length filter_overlong_prompts shuffle train_max_samples",
    "RewardArgs": "reward_env reward on_reward_error max_unscored_steps overlong_buffer_len",
    "EnvironmentArgs": "env tools agent serve_policy",
    "EngineArgs": "rollout_n max_response_length temperature top_p top_k ignore_eos engine max_num_seqs max_num_batched_tokens "
    "keep_sampling_mask rollout_dtype rollout_tp rollout_seeds",
    "LearnerArgs": "param_offload activation_offload "
    "dtype gradient_checkpointing compile max_tokens_per_micro_batch sequence_parallel expert_parallel "
    "ppo_epochs freeze_vision_tower",
    "AdapterArgs": "lora_rank lora_model",
    "OptimizerArgs": "optimizer_offload "
    "lr lr_warmup_steps lr_scheduler_type weight_decay adam_beta1 adam_beta2 grad_clip optim grad_dtype",
    "RouterArgs": "router_replay",
    "LogArgs": "experiment_name output_dir logger record_samples",
    "CheckpointArgs": "save_freq max_ckpt_to_keep resume_mode",
    "WatchdogArgs": "hang_timeout",
    "BatchSchedule": "train_batch_size ppo_mini_batch_size",
    "SyncSchedule": "over_sample",
    "SplitArgs": "generators ring_mb publish_over",
    "AsyncSchedule": "train_batch_size publish_every staleness_threshold max_staleness",
    "CodeArgs": "code_score code_tests code_timeout code_memory_limit_gb",
    "PlanArgs": "nnodes nproc_per_node device from_run response_lengths image_size",
}


def over_environments(environments):
    """A reward function in TRL's form."""
    return [0.0 for _ in environments]


def look(words: str, script: str = "sync") -> dict[str, str]:
    args = (SCRIPTS | {"plan": PLAN})[script]
    parsed = flags.read(args, args=words.split())
    return flag_needs.without_effect(parsed, flag_needs.given(args, words.split()))


def combined(case: tuple, which: int) -> dict[str, str]:
    return look(f"{case[0]} {case[which]}", [*case, "sync"][3])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_a_flag_without_its_need_is_named_and_with_it_is_not(case, capfd):
    name = case[0].split()[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    lacking = combined(case, 1)
    assert lacking.pop(name).startswith(f"--{name.replace('_', '-')} does nothing ")
    assert not lacking or WITH.get(name) == set(lacking), "and no other"
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith("warning: --"), "one line, when the command line is read"
    assert combined(case, 2) == {} and capfd.readouterr().err == ""


def test_a_new_flag_has_to_be_classified():
    """Every flag of every script and of plan.py is either in CASES or in ALWAYS."""
    in_cases = {name for case in CASES for name in flag_needs.given(PLAN, case[0].split()[:1])} | BY_SCRIPT
    assert in_cases == set(flag_needs.NEEDS)
    for args in (*SCRIPTS.values(), plan.PlanArgs):
        bases = {part for owner in (args, *(leaf.owner for leaf in parts.leaves(args).values())) for part in owner.__mro__}
        for part in bases:
            fields = {field.name for field in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else set()
            own = {name for name in vars(part).get("__annotations__", {}) if name in fields & {*parts.leaves(args)}} - in_cases
            assert own == {*ALWAYS.get(part.__name__, "").split()}, part.__name__


def test_the_clips_are_those_that_each_loss_takes():
    """The losses' signatures are compared with the docs' table of clips."""
    table = re.findall(r"^\| (`[^|]*) \| (?:yes|no) \| [^|]* \| ([^|]*) \|", (ROOT / "docs/algorithms.md").read_text(), re.M)
    clips = {name: set(re.findall(r"(\w+)=", taken)) for names, taken in table for name in re.findall(r"`(\w+)`", names)}
    assert set(clips) == set(losses.POLICY_LOSSES)
    for mode, takes in clips.items():
        idle = look(f"--loss-mode {mode} --clip-ratio-low 0.1 --clip-ratio-high 0.1 --clip-ratio-c 2")
        assert {name.removeprefix("clip_ratio_") for name in idle} == {"low", "high", "c"} - takes


@pytest.mark.parametrize(
    "words",
    [
        "--kl-reward-coef 0 --kl-loss-coef 0.0 --no-use-kl-loss",
        "--test-freq 0 --no-val-before-train --val-max-samples -1 --log-val-generations 0",
        "--engine embedded --no-enforce-eager --no-enable-chunked-prefill",
        "--filter-overlong-prompts --truncation error",
        "--no-ref-offload --no-rollout-is-batch-normalize",
    ],
)
def test_to_turn_off_what_is_off_is_no_mistake(words, capfd):
    assert not look(words) and not capfd.readouterr().err


def test_defaults_that_were_not_given_are_no_mistake(capfd):
    for script in SCRIPTS:
        assert not look("", script)
    assert not capfd.readouterr().err


def test_how_a_flag_is_written_does_not_matter(capfd):
    for words in (["--kl-reward-coef", "1"], ["--kl_reward_coef", "1"], ["--kl-reward-coef=1"], ["--kl_reward_coef=1"]):
        assert [*flag_needs.given(train_sync.Args, words)] == ["kl_reward_coef"]
    assert flag_needs.given(train_sync.Args, ["--no-val-before-train", "--lr", "1"]) == {"val_before_train", "lr"}


def test_the_free_cache_of_an_engine_that_never_sleeps():
    assert look("--free-cache-engine --engine vllm", "async") and look("--free-cache-engine --engine vllm", "one_step_off")
    assert not look("--no-free-cache-engine --engine vllm", "async") and not look("--free-cache-engine --engine vllm")


def test_a_fork_without_a_flag_that_another_needs_is_not_stopped():
    @dataclasses.dataclass
    class Args:
        kl_reward_coef: float = 0.0
        clip_ratio_c: float = 3.0

    assert flag_needs.without_effect(Args(), ["kl_reward_coef", "clip_ratio_c"]) == {}


def test_a_run_says_it_once_in_one_line(tmp_path):
    words = "--kl-reward-coef 0.1 --loss-mode gspo --clip-ratio-c 10"
    words += " --total-training-steps 1 --test-freq 0 --train-batch-size 2 --ppo-mini-batch-size 2 --rollout-n 2"
    _, _, done = train("train_sync.py", *words.split(), out=tmp_path, ranks=2)
    (warning,) = [line for line in done.stderr.splitlines() if "does nothing" in line]
    assert "; --kl-reward-coef does nothing without --use-kl-in-reward." in warning and "--clip-ratio-c" in warning


def test_plan_says_it_too(monkeypatch, capsys):
    """It warns before it plans."""
    for part in ("plan_memory", "plan_time"):
        monkeypatch.setattr(plan, part, lambda *_: None)
    plan.main(["train_sync.py", "--model", "demo", "--kl-reward-coef", "0.1", "--device", "H100-80GB"])
    assert "--kl-reward-coef does nothing without --use-kl-in-reward" in capsys.readouterr().err
