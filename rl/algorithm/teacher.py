"""On-policy distillation: the models that can be a teacher, and what it reads. Only imported with --teacher.

The policy samples, and a frozen model, or the policy itself with the answer in its prompt (--teacher-prompt), gives the
probability of each token. Left out: teachers with a different vocabulary, teachers behind a network address, moving averages of
the policy, and agents, whose later conversations hold the policy's prompt.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from rl.environments.named import environment_flag
from rl.errors import UserError
from rl.learning.batch import Batch, Micros, TopTokens, micro_batch
from rl.learning.learner import Learner
from rl.model.pretrained import check_second_model, load_config, resolve, takes_images
from rl.model.sequence_parallel import gather_log_probs
from rl.ranks.watchdog import progress


def check_flags(args) -> None:
    """Raise UserError for flags that contradict a teacher."""
    own = args.teacher
    _check_prompt(own, args.environment)
    loss = args.loss.policy_loss
    if not own.teacher_top_k and (loss.one_advantage or loss.chooses):
        why = "averages it over the response" if loss.one_advantage else "chooses tokens before it is known"
        raise UserError(
            f"--teacher gives each token its own advantage, and --loss-mode {args.loss.loss_mode} {why}. Take another one, "
            "such as ppo_clip."
        )
    if own.teacher_alone and args.loss.filter_groups:
        raise UserError(
            "--filter-groups keeps groups by their scores, which do not count with --teacher-alone. Leave one of the two out."
        )
    if own.teacher_alone and (inputs := args.loss.estimator.inputs):
        raise UserError(
            f"--adv-estimator {args.loss.adv_estimator} compares scores with {', '.join(inputs)}, and with --teacher-alone no "
            "score counts. Leave one of the two out."
        )


def _check_prompt(own, environment) -> None:
    prompt = own.teacher_prompt
    if prompt is None:
        if not own.has_second_model:
            raise UserError("--teacher self: from its own prompt the policy learns nothing. Add --teacher-prompt.")
    elif "{" not in prompt:
        raise UserError(
            f"--teacher-prompt {prompt!r} is the same for all rows. Put {{prompt}} into it, and what the teacher is to know, "
            "such as {ground_truth}."
        )
    elif environment.has_agent:
        raise UserError(
            f"--teacher-prompt with {environment_flag(environment)[0]}: an agent's later conversations hold the policy's "
            "prompt. Leave one of them out."
        )


def teacher_path(args, policy: str) -> str:
    """Return the path of the teacher's model. policy: the path of --model."""
    return resolve(args.teacher.teacher) if args.teacher.has_second_model else policy


def check_teacher(path: str, args, policy: str) -> None:
    """Raise UserError unless the model at `path` can teach the one at `policy`. No weights are read."""
    own, theirs = (load_config(at, args.trust_remote_code, name) for at, name in ((policy, "--model"), (path, "--teacher")))
    tokenizer = check_second_model(path, args, policy, "--teacher", "A teacher")
    if args.teacher.teacher_top_k >= (tokens := len(tokenizer.get_vocab())):
        raise UserError(f"--teacher-top-k {args.teacher.teacher_top_k}: the vocabulary has {tokens:,} tokens. Take fewer.")
    if takes_images(own) or takes_images(theirs):
        raise UserError(f"--teacher {path}: models that take images cannot teach or be taught here.")
    if args.learner.expert_parallel > 1 and args.teacher.has_second_model:
        raise UserError("--expert-parallel divides the policy's experts, not a teacher's. Leave it out with --teacher.")


class Teacher:
    """The model that teaches, and what it reads."""

    def __init__(self, model, top_k: int = 0, ids_of: Callable[[int, list[int]], Sequence[int]] | None = None):
        """model: a Policy. top_k: its tokens to compare in each place, 0: only the sampled one. ids_of: with --teacher-prompt,
        (ticket, token ids of the policy's prompt) -> token ids of the teacher's prompt."""
        self.model, self.top_k, self._ids_of = model, top_k, ids_of

    @staticmethod
    def of(args, job, learner: Learner) -> "Teacher":
        """args: the script's; job: its Job."""
        ids_of = None
        if args.teacher.teacher_prompt is not None:
            ids_of = partial(job.teacher_prompts.ids_of, job.order)
        if args.teacher.has_second_model:
            path = resolve(args.teacher.teacher)
            is_base = learner.adapters and path == learner.path  # adapters are all that differs
            model = learner.adapters.without(learner.policy) if is_base else learner.load_frozen(path, "teacher")
        else:
            model = learner.policy  # a mixture's routes are computed, not replayed
        return Teacher(model, args.teacher.teacher_top_k, ids_of)

    @torch.no_grad()
    def targets_of(self, learner: Learner, batch: Batch, micros: Micros) -> tuple[torch.Tensor, TopTokens | None]:
        """Return the teacher's log-probs [N] of this rank's tokens and with --teacher-top-k its likeliest ones, on the CPU."""
        ranks = learner.ranks
        taught = self._with_its_prompts(batch) if self._ids_of else None
        out = torch.zeros(len(batch.token))
        top = None
        if count := self.top_k:
            top = TopTokens(torch.zeros(len(out), count, dtype=torch.int32), torch.zeros(len(out), count))
        for micro in itertools.chain.from_iterable(micros):
            if taught:  # its responses after the teacher's prompts: the same bits if these are the policy's
                micro = micro_batch(taught, batch.seq[micro.index].unique().tolist(), ranks)
            if not count:
                out[micro.index] = learner.log_probs(self.model, micro)[0].cpu()
                continue
            progress()
            where = (micro.inputs, micro.layout, micro.predict, micro.labels)
            vocabulary = learner.config.get_text_config().vocab_size
            sampled, token, log_prob = self.model(*where, learner.temperature, "none", top=(count, vocabulary))
            if micro.own is not None:
                every = torch.cat([sampled[:, None], token.float(), log_prob], 1)  # exact: token ids are below 2^24
                every, _ = gather_log_probs(micro, ranks, every, torch.zeros_like(sampled))
                sampled, token, log_prob = every.split([1, count, count], 1)
            out[micro.index] = sampled.view(-1).cpu()
            top.token[micro.index] = token.to("cpu", torch.int32)
            top.log_prob[micro.index] = log_prob.cpu()
        self.model.reshard()
        return out, top

    def _with_its_prompts(self, batch: Batch) -> Batch:
        """Return the batch with the teacher's prompts for the responses that are here. Longer prompts make a row longer than a
        micro-batch may be: a token takes less memory than in the update, but nothing limits their number."""
        prompts = [*batch.prompts]
        of_group = {}
        for i in torch.nonzero(batch.local_lengths).flatten().tolist():
            group = int(batch.group[i])
            if group not in of_group:
                of_group[group] = np.array(self._ids_of(batch.tickets[group], batch.prompts[i].tolist()), np.int32)
            prompts[i] = of_group[group]
        nothing = [None] * len(prompts)
        return dataclasses.replace(batch, prompts=prompts, routes=nothing, prompt_routes=nothing)
