"""On-policy distillation: the flags of a teacher, and which models can be one.

The policy samples, and a frozen model gives the probability of each token. losses.py has the formulas.
Left out: a teacher with another vocabulary, or one behind a network address.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from transformers import PreTrainedTokenizerBase

import losses
from rl.data.image_prompts import takes_images
from rl.errors import UserError
from rl.model.pretrained import check_model, load_config, load_tokenizer
from rl.ranges import Content, Range


@dataclass
class TeacherArgs:
    """Distillation on the policy's own samples, from a second model that stays as it is."""

    teacher: Annotated[str | None, Content("model")] = None
    """Model to learn from, with the policy's vocabulary: a Hugging Face directory or hub name."""
    teacher_coef: Annotated[float, Range(above=0)] = 1.0
    """Weight of the KL to the teacher, next to the rewards'."""
    teacher_top_k: Annotated[int, Range(at_least=0)] = 0
    """Compare the two distributions at this many of the teacher's most likely tokens, and at all others together. 0: at the
    sampled token alone, as an advantage."""
    teacher_alone: bool = False
    """Rewards do not count: the policy learns from the teacher alone."""

    @property
    def teacher_form(self) -> Literal["advantage", "top_k"] | None:
        """How a teacher enters the loss: as an advantage of each sampled token, or as a term of its own over its likeliest."""
        return ("top_k" if self.teacher_top_k else "advantage") if self.teacher else None

    def check(self) -> None:
        """Raises UserError for flags that a teacher makes meaningless."""
        if self.teacher_alone and not self.teacher:
            raise UserError("--teacher-alone: without --teacher there is nothing to learn from. Add it, or leave the flag out.")
        if not self.teacher:
            return
        loss, estimator = losses.POLICY_LOSSES[self.loss_mode], losses.ADVANTAGES[self.adv_estimator]
        if self.teacher_form == "advantage" and (loss.one_advantage or loss.chooses):
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


def check_vocabulary(path: str, args, policy: str, flag: str, whose: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of the model at `path`, which `flag` names. Raises UserError unless it is that of the one at
    `policy`: their tokens are compared, since models of one family may have embeddings of different lengths (Qwen2.5's differ
    from 7B on). whose: "A teacher"."""
    tokenizer = load_tokenizer(path, args.trust_remote_code, flag)
    ours, its = load_tokenizer(policy, args.trust_remote_code).get_vocab(), tokenizer.get_vocab()
    if differing := sorted(token for token in ours.keys() | its.keys() if ours.get(token) != its.get(token)):
        token = differing[0]
        ids = " and ".join("missing" if vocabulary.get(token) is None else f"{vocabulary[token]}" for vocabulary in (ours, its))
        raise UserError(
            f"{flag} {path}: its tokenizer is not that of --model {policy}: {len(differing):,} tokens differ, such as "
            f"{token!r} ({ids}). {whose} reads the policy's tokens: take a model of the same family."
        )
    return tokenizer


def check_teacher(path: str, args, policy: str) -> None:
    """Raises UserError unless the model at `path` can teach that at `policy`. Reads no weights."""
    own, theirs = (load_config(at, args.trust_remote_code, name) for at, name in ((policy, "--model"), (path, "--teacher")))
    tokenizer = check_vocabulary(path, args, policy, "--teacher", "A teacher")
    check_model(path, tokenizer, args, "--teacher")
    if args.teacher_top_k >= (tokens := len(tokenizer.get_vocab())):
        raise UserError(f"--teacher-top-k {args.teacher_top_k}: the vocabulary has {tokens:,} tokens. Take fewer.")
    if takes_images(own) or takes_images(theirs):
        raise UserError(f"--teacher {path}: models that take images cannot teach or be taught here.")
    if args.expert_parallel > 1:
        raise UserError("--expert-parallel divides the policy's experts, not a teacher's. Leave it out with --teacher.")
