"""On-policy distillation: the flags of a teacher, and the models that can be one.

The policy samples, and a frozen model, or the policy itself with the answer in its prompt, gives the probability of each token.
Left out: teachers with a different vocabulary, teachers behind a network address, and moving averages of the policy.
"""

from dataclasses import dataclass
from typing import Annotated

from transformers import PretrainedConfig, PreTrainedTokenizerBase

import losses
from rl.data.image_prompts import takes_images
from rl.errors import UserError
from rl.model.attention import check_supported
from rl.model.pretrained import check_model, load_config, load_tokenizer, resolve
from rl.ranges import Content, Range

SELF = "self"  # instead of a model


@dataclass
class TeacherArgs:
    """Distillation on the policy's own samples, from a second model, or from the policy with the answer in its prompt."""

    teacher: Annotated[str | None, Content("model")] = None
    """Model to learn from, with the policy's vocabulary: a Hugging Face directory or hub name, or "self" for the policy at the
    beginning of a step."""
    teacher_prompt: str | None = None
    """What the teacher reads instead of the prompt's last message, such as "{prompt} Here is a solution: {answer}". {prompt} is
    that message, {ground_truth} the row's ground truth, any other name a column or a key of extra_info. By default the teacher
    reads the policy's prompt."""
    teacher_max_prompt_length: Annotated[int | None, Range(at_least=1)] = None
    """Longest prompt of the teacher with --teacher-prompt, in tokens. Default: --max-prompt-length."""
    teacher_coef: Annotated[float, Range(above=0)] = 1.0
    """Weight of the KL to the teacher, relative to the rewards."""
    teacher_top_k: Annotated[int, Range(at_least=0)] = 0
    """Compare the two distributions at this many of the teacher's most likely tokens, and at all others together. 0: only at
    the sampled token, as an advantage."""
    teacher_alone: bool = False
    """Rewards do not count: the policy only learns from the teacher."""

    @property
    def reward_weight(self) -> float:
        """The factor of the rewards: 0 with --teacher-alone, otherwise 1."""
        return 0.0 if self.teacher_alone else 1.0

    @property
    def has_second_model(self) -> bool:
        return self.teacher not in (None, SELF)

    @property
    def longest_of_teacher(self) -> int:
        """Largest number of tokens in a prompt that the teacher reads."""
        return (self.teacher_prompt is not None and self.teacher_max_prompt_length) or self.max_prompt_length

    def check(self) -> None:
        """Raise UserError for flags that a teacher makes meaningless."""
        if self.teacher_alone and not self.teacher:
            raise UserError("--teacher-alone: without --teacher there is nothing to learn from. Add it, or leave the flag out.")
        if not self.teacher:
            return
        self._check_prompt()
        loss = losses.POLICY_LOSSES[self.loss_mode]
        estimator = losses.ADVANTAGES[self.adv_estimator]
        if not self.teacher_top_k and (loss.one_advantage or loss.chooses):
            why = "averages it over the response" if loss.one_advantage else "chooses tokens before it is known"
            raise UserError(
                f"--teacher gives each token its own advantage, and --loss-mode {self.loss_mode} {why}. Take another one, "
                "such as ppo_clip."
            )
        if self.teacher_alone and self.filter_groups:
            raise UserError(
                "--filter-groups keeps groups by their scores, which do not count with --teacher-alone. Leave one of the two "
                "out."
            )
        if self.teacher_alone and estimator.inputs:
            raise UserError(
                f"--adv-estimator {self.adv_estimator} compares scores with {', '.join(estimator.inputs)}, and with "
                "--teacher-alone no score counts. Leave one of the two out."
            )

    def _check_prompt(self) -> None:
        if self.teacher_prompt is None:
            if self.teacher == SELF:
                raise UserError("--teacher self: from its own prompt the policy learns nothing. Add --teacher-prompt.")
        elif "{" not in self.teacher_prompt:
            raise UserError(
                f"--teacher-prompt {self.teacher_prompt!r} is the same for all rows. Put {{prompt}} into it, and what the "
                "teacher is to know, such as {ground_truth}."
            )
        elif self.has_agent:
            raise UserError(
                f"--teacher-prompt with {self.environment_flag[0]}: an agent's later conversations hold the policy's prompt. "
                "Leave one of them out."
            )


def teacher_path(args, policy: str) -> str:
    """Return the path of the teacher's model. policy: the path of --model."""
    return policy if args.teacher == SELF else resolve(args.teacher)


def check_vocabulary(path: str, args, policy: str, flag: str, whose: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model at `path`, which `flag` names. Raise UserError unless it equals that of the model at
    `policy`: their tokens are compared, because models of one family may have embeddings of different lengths (Qwen2.5's differ
    from 7B on). whose: the subject of the message, such as "A teacher"."""
    load_config(path, args.trust_remote_code, flag)  # first: without a model, a missing tokenizer is not the problem
    tokenizer = load_tokenizer(path, args.trust_remote_code, flag)
    ours = load_tokenizer(policy, args.trust_remote_code).get_vocab()
    its = tokenizer.get_vocab()
    if differing := sorted(token for token in ours.keys() | its.keys() if ours.get(token) != its.get(token)):
        token = differing[0]
        ids = " and ".join("missing" if vocabulary.get(token) is None else f"{vocabulary[token]}" for vocabulary in (ours, its))
        raise UserError(
            f"{flag} {path}: its tokenizer is not that of --model {policy}: {len(differing):,} tokens differ, such as "
            f"{token!r} ({ids}). {whose} reads the policy's tokens: take a model of the same family."
        )
    return tokenizer


def check_teacher(path: str, args, policy: str) -> None:
    """Raise UserError unless the model at `path` can teach the one at `policy`. No weights are read."""
    own, theirs = (load_config(at, args.trust_remote_code, name) for at, name in ((policy, "--model"), (path, "--teacher")))
    tokenizer = check_vocabulary(path, args, policy, "--teacher", "A teacher")
    check_model(path, tokenizer, args, "--teacher")
    if args.teacher_top_k >= (tokens := len(tokenizer.get_vocab())):
        raise UserError(f"--teacher-top-k {args.teacher_top_k}: the vocabulary has {tokens:,} tokens. Take fewer.")
    if takes_images(own) or takes_images(theirs):
        raise UserError(f"--teacher {path}: models that take images cannot teach or be taught here.")
    if args.expert_parallel > 1 and args.has_second_model:
        raise UserError("--expert-parallel divides the policy's experts, not a teacher's. Leave it out with --teacher.")
    _check_length(theirs.get_text_config(), path, args)


def _check_length(config: PretrainedConfig, path: str, args) -> None:
    """Raise UserError unless the model can read the teacher's longest prompt with a response."""
    prompt, response = args.longest_of_teacher, args.max_response_length
    context = getattr(config, "max_position_embeddings", None)
    if context and prompt + response > context:
        raise UserError(
            f"--teacher-max-prompt-length {prompt} + --max-response-length {response} = {prompt + response} tokens, but the "
            f"context of --teacher {path} is {context}. Lower one of them."
        )
    check_supported(config, f"--teacher {path}", prompt + response)
