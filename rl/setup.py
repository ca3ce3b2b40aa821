"""The start of every script: the flags that all scripts share, and what is made before the first step: the model, the data,
and what hands weights to an engine in the same process.

Left out: joining the process groups (rl/ranks/dist.py), and the flags of a component, which are defined with it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rl import flags, parts
from rl.algorithm.args import CriticArgs, LossArgs, RolloutCorrectionArgs, TeacherArgs
from rl.checkpoint.files import CheckpointArgs
from rl.data.args import CALCULATOR, DataArgs, demo_files
from rl.data.job import Job, order_of
from rl.data.prompts import PromptDataset
from rl.environments.args import EnvironmentArgs
from rl.errors import UserError
from rl.generation.engine import Engine, EngineArgs, SamplingArgs
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.model.attention import dtype_of
from rl.model.pretrained import check_model, empty_model, end_token_ids, load_config, load_tokenizer, resolve, takes_images
from rl.ranges import MayChange, Range, flag
from rl.ranks import launch
from rl.ranks.dist import Ranks
from rl.record.run import LogArgs
from rl.rewards.pool import RewardArgs, check_sources
from rl.samples.schedule import BatchSchedule, Schedule, check_kind

DEFAULT_STEPS = 200  # to train without a flag


@dataclass
class RunArgs:
    """The model, the length of the run, and validation."""

    schedule: Schedule = field(kw_only=True)  # each script has a kind of its own

    model: MayChange[str] = "demo"
    """Model to train: a Hugging Face directory or hub name, or a tiny model that is made here: "demo", "demo-moe" (a mixture of
    experts), "demo-hybrid" (with a gated delta net), "demo-vl" (with images) or "demo-calculator" (with a tool)."""
    trust_remote_code: MayChange[bool] = False
    """Run the Python code in the model's directory or hub page."""
    chat_template_args: tuple[str, ...] = ()
    """Arguments of the chat template, as name=value, wherever a conversation becomes tokens: enable_thinking=false. Values are
    read as JSON if they are JSON. Checkpoints have them as defaults of their template."""
    system_prompt: str | None = None
    """System message of conversations that begin without one. A prompt that is a string has none."""
    seed: Annotated[int, Range(at_least=0)] = 0
    """Seed of the prompt order, the sampling and everything else that is random."""
    total_training_steps: MayChange[Annotated[int | None, Range(at_least=1)]] = None
    """Steps to train. Overrides --total-epochs and --total-rollout-steps; 200 if none of the three is given."""
    total_epochs: MayChange[Annotated[int | None, Range(at_least=1)]] = None
    """Passes over the training prompts, rounded down to whole steps. A step may span two passes."""
    total_rollout_steps: MayChange[Annotated[int | None, Range(at_least=1)]] = None
    """Prompts to train on, rounded down to whole steps. With --total-epochs, the smaller limit ends the run."""
    test_freq: MayChange[Annotated[int, Range(at_least=0, also=-1)]] = 20
    """Steps between validations. The last step is always validated; train_async.py validates at the next publish. 0 or -1 never
    validates."""
    val_before_train: MayChange[bool] = True
    """Also validate before the first step, unless --test-freq is 0 or -1."""
    val_only: MayChange[bool] = False
    """Train nothing: validate --model once (it may be a checkpoint's directory), record the result, and end."""
    hang_timeout: MayChange[Annotated[float, Range(at_least=0, at_most=1_000_000_000)]] = 1800.0
    """Seconds that a rank may go without progress. Then the ranks print the stacks of their threads, and the job ends. Must
    exceed the longest step and the initial download of the model. 0 disables it."""

    def total_steps(self, num_prompts: int) -> int:
        """Return the number of steps to train on this many training prompts."""
        if self.val_only:
            return 0
        if self.total_training_steps is not None:
            return self.total_training_steps
        of_epochs = self.total_epochs and self.total_epochs * num_prompts
        prompts = [limit for limit in (of_epochs, self.total_rollout_steps) if limit is not None]
        return max(1, min(prompts) // self.schedule.prompts_per_step) if prompts else DEFAULT_STEPS

    def validates(self, version: int, total_steps: int) -> bool:
        """Return whether this version of the weights is validated; 0 is the model at the start."""
        if self.val_only:
            return version == 0
        if self.test_freq < 1 or version == 0:
            return self.test_freq > 0 and self.val_before_train
        step, before = self.schedule.step_of(version, total_steps), self.schedule.step_of(version - 1, total_steps)
        return step == total_steps or step // self.test_freq > before // self.test_freq


@dataclass
class CommonArgs(RunArgs):
    """Flags of all scripts that train by reward. Each part is defined with its component."""

    data: DataArgs = DataArgs()
    sampling: SamplingArgs = SamplingArgs()
    reward: RewardArgs = RewardArgs()
    environment: EnvironmentArgs = EnvironmentArgs()
    engine: EngineArgs = EngineArgs()
    loss: LossArgs = LossArgs()
    correction: RolloutCorrectionArgs = RolloutCorrectionArgs()
    critic: CriticArgs = CriticArgs()
    teacher: TeacherArgs = TeacherArgs()
    learner: LearnerArgs = field(default_factory=LearnerArgs)
    log: LogArgs = LogArgs()
    checkpoint: CheckpointArgs = CheckpointArgs()

    @property
    def old_is_rollout(self) -> bool:
        """Whether the old log-probs are the generator's."""
        if self.loss.use_rollout_log_probs is not None:
            return self.loss.use_rollout_log_probs
        return self.schedule.trains_stale and not self.correction.corrects_rollout and not self.loss.compares_itself

    def recompute_old_log_probs(self, updates: int) -> bool:
        """Return whether log-probs of the policy before the step need a separate forward pass. They do not if the old ones are
        the generator's, or for a batch with one update, whose ratio is 1, unless something needs them earlier."""
        chooses = self.loss.policy_loss.chooses
        asked = self.correction.corrects_rollout or self.loss.kl_reward_coef > 0 or chooses is not None
        return not self.old_is_rollout and (updates > 1 or asked)

    @property
    def skips_backward(self) -> bool:
        """Whether micro-batches without an advantage only get a forward pass: the loss has no term that trains them."""
        own = self.loss
        loss = own.policy_loss
        return not (own.kl_loss_coef or own.entropy_coeff or self.teacher.teacher or loss.chooses or loss.trains_all)

    @property
    def packs_flat_apart(self) -> bool:
        """Whether groups with equal scores, whose advantages are 0, get separate micro-batches."""
        is_by_group = self.loss.estimator.group_of_one is not None
        return self.skips_backward and is_by_group and not self.loss.kl_reward_coef

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest prompt, and of the longest response."""
        return self.data.max_prompt_length, self.sampling.max_response_length

    def check(self) -> None:
        """Raise UserError for flags of different groups that contradict each other."""
        check_kind(self, BatchSchedule, "training by reward")
        self.schedule.check_engines(launch.here().world_size // self.engine.rollout_tp)
        if self.val_only and self.checkpoint.resume_mode not in ("auto", "disable"):
            raise UserError(f"--val-only resumes nothing. To validate a checkpoint give --model {self.checkpoint.resume_mode}.")
        if self.reward.overlong_buffer_len > self.sampling.max_response_length:
            raise UserError(
                f"--overlong-buffer-len {self.reward.overlong_buffer_len} is more than --max-response-length "
                f"{self.sampling.max_response_length}: every response would be penalised. Lower it."
            )
        if self.sampling.keep_sampling_mask and self.teacher.teacher_top_k:
            raise UserError(
                "--teacher-top-k compares distributions over the whole vocabulary; --keep-sampling-mask trains the truncated "
                "one. Leave one of the two out."
            )
        if self.learner.router_replay == "R2" and self.old_is_rollout:
            raise UserError(
                "--router-replay R2 replays the pass that recomputes the old log-probs, and this run takes the generator's as "
                "the old ones. Give R3, or add --rollout-is token."
            )


def set_up(args: CommonArgs, file: str) -> Job:
    """Seed torch; read data, and the model without weights. Raise UserError if they cannot be used. file: the script."""
    torch.manual_seed(args.seed)
    model = CALCULATOR if args.environment.env == CALCULATOR and args.model == RunArgs.model else args.model
    path, config, tokenizer = read_model(model, args)
    if args.teacher.teacher:
        from rl.algorithm.teacher import check_teacher, teacher_path  # late, like all that a plain run does without

        check_teacher(teacher_path(args, path), args, path)
    if args.loss.needs_critic:
        from rl.algorithm.critic import check_critic

        check_critic(resolve(args.critic.critic_model or path), args, path)
    if args.learner.router_replay != "off":
        from rl.model.router import check_replay

        check_replay(args, empty_model(config, args.trust_remote_code), f"--model {path}")
    prep = None
    if takes_images(config):
        from rl.data.image_prompts import ImagePrep  # late: few models take any

        prep = ImagePrep(path, config)
    if args.learner.freeze_vision_tower and not prep:
        raise UserError(f"--freeze-vision-tower: --model {path} takes no images. Leave the flag out.")
    flags.warn(values_of_the_demo(args, sys.argv[1:]))
    train_files, val_files = (demo_files(model, files) for files in (args.data.train_files, args.data.val_files))
    environments = by_name = None
    if args.environment.has_environment:
        environments, by_name = start_environments(args, path, tokenizer, prep)
    prompts = PromptDataset(train_files, "train", tokenizer, args.data, prep, by_name)
    teacher_prompts = None
    if args.teacher.teacher and args.teacher.teacher_prompt is not None and not args.val_only:
        from rl.data.teacher_prompts import TeacherPrompts  # late: it also removes rows whose teacher prompt is left out

        teacher_prompts = TeacherPrompts(prompts, args.teacher.teacher_prompt)
    validates = args.test_freq > 0 or args.val_only
    val_sets = None
    if validates and any("=" in word for word in val_files):
        from rl.generation.val_sets import ValSets  # late: few runs have any

        val_sets = ValSets(val_files, args.sampling)
        val_files = val_sets.files
    val_prompts = PromptDataset(val_files, "val", tokenizer, args.data, prep, by_name) if validates else None
    sources = prompts.sources() | (val_prompts.sources() if val_prompts else {})
    if not (args.environment.env or args.environment.has_agent):  # these may score themselves
        check_sources(sources, args.reward)
    return Job(
        script=Path(file).stem,
        path=path,
        tokenizer=tokenizer,
        prompts=prompts,
        val_prompts=val_prompts,
        order=order_of(prompts, args.seed, args.data.shuffle),
        total_steps=args.total_steps(len(prompts)),
        environments=environments,
        val_sets=val_sets,
        teacher_prompts=teacher_prompts,
    )


def values_of_the_demo(args: CommonArgs, words: Sequence[str]) -> list[str]:
    """Return a sentence if other data than the demo's would be trained on with default values that suit the demo alone."""
    if args.data.train_files == DataArgs.train_files or args.val_only:
        return []
    fit = {"max_response_length": args.sampling.max_response_length}
    if not args.learner.adapted:
        fit["lr"] = args.learner.lr
    if args.test_freq > 0:
        fit["val_files"] = args.data.val_files
    given = flags.names_in(type(args), words)
    leaves = parts.leaves(type(args))
    names = [name for name, value in fit.items() if name not in given and value == leaves[name].default]  # a replay has others
    left = [f"{flag(name)} {' '.join(x) if isinstance(x := fit[name], tuple) else format(x, 'g')}" for name in names]
    also = "Pretrained models take --lr 1e-6 to 2e-5, and responses of hundreds of tokens (README.md, Your model and data)"
    return [f"{', '.join(left)}: what suits the demo, for you give none. {also}"] if left else []


def read_model(model: str, args) -> tuple[str, PretrainedConfig, PreTrainedTokenizerBase]:
    """Return the path of --model, its config and its tokenizer. args: the script's. Raise UserError if it cannot be trained."""
    path = resolve(model)
    config = load_config(path, args.trust_remote_code)  # first: without a model, a missing tokenizer is not the problem
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    if args.chat_template_args or args.system_prompt:
        from rl.data.chat_template import with_defaults

        tokenizer = with_defaults(tokenizer, args.chat_template_args, args.system_prompt)
    check_model(path, tokenizer, args)
    if args.learner.adapted:
        from rl.learning.adapters import check_model as check_adapters

        check_adapters(empty_model(config, args.trust_remote_code), args.learner, f"--model {path}")
    return path, config, tokenizer


def start_environments(args: CommonArgs, path: str, tokenizer: PreTrainedTokenizerBase, prep: Any) -> tuple[Any, dict]:
    """Start the process from which environments are forked. Return it, and what PromptDataset is to know of each."""
    from rl.environments import named  # late: few runs have an environment
    from rl.environments.pool import Environments

    ends = end_token_ids(path, tokenizer, args.trust_remote_code)
    given = {"chat_template": tokenizer.chat_template, "system_prompt": args.system_prompt, "prep": prep}
    can_resume = not args.schedule.over_sample  # not within a text of a schema
    given["keeps_schemas"] = args.engine.engine == "vllm" and args.sampling.keep_sampling_mask and can_resume
    if args.reward.scores_environments:
        given |= {"reward": args.reward.reward, "reward_weights": args.reward.reward_weights}
    environments = Environments(args.environment, path, ends, args.trust_remote_code, **given)
    if environments.note:
        flags.warn([f"{named.environment_flag(args.environment)[0]}: {environments.note.rstrip('.')}"])
    tools = environments.tools.items()
    return environments, {name: (its, named.brought(args.environment, args.reward.own_reward, name)) for name, its in tools}


def make_learner(args: CommonArgs, job: Job, ranks: Ranks) -> Learner:
    """Return the learner of this rank, with the learning-rate schedule of the whole run. --val-only loads no second model."""
    if args.schedule.split:
        from rl.split import engines_first  # late: other ranks use their device in turns

        engines_first("learner")
    trains = not args.val_only
    learner = Learner(
        job.path,
        args.learner,
        ranks,
        job.total_steps,
        temperature=args.sampling.temperature,
        with_reference=args.loss.needs_reference and trains,
        trust_remote_code=args.trust_remote_code,
        seed=args.seed,
    )
    if args.teacher.teacher and trains:
        from rl.algorithm.teacher import Teacher

        learner.teacher = Teacher.of(args, job, learner)
    if args.loss.needs_critic and trains:
        from rl.algorithm.critic import Critic

        learner.critic = Critic(resolve(args.critic.critic_model or job.path), args, learner.ranks, job.total_steps)
    return learner


class LocalWeights:
    """The learner's weights for the engine in the same process, in the precision `dtype`, as train_sync.py publishes them.

    Parameters that are never trained (--freeze-vision-tower) are gathered from the learners once, with the first publish. An
    engine that shows its own tensors gets these again; other engines take whole sets only, so a copy is kept in host memory.
    """

    def __init__(self, learner: Learner, engine: Engine, dtype: torch.dtype):
        self.learner = learner
        self.engine = engine
        self.dtype = dtype
        self._kept: dict[str, torch.Tensor] | None = None  # the parameters never trained, after the first publish

    def publish(self, version: int) -> None:
        """Give the engine the learner's weights between two steps. A collective of the learners."""
        self.engine.update(self._weights(), version)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter."""
        kept = self._kept or {}
        is_first = self._kept is None
        for name, tensor in self.learner.weights(self.dtype, frozen=is_first):
            yield name, tensor
            if name in self.learner.frozen:
                shows_own = self.engine.shares_memory
                dtype = dtype_of(name, self.dtype)
                kept[name] = self.engine.read_back(name) if shows_own else tensor.to("cpu", dtype, copy=True)
        self._kept = kept
        if not is_first:
            yield from kept.items()
