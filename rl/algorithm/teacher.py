"""On-policy distillation: the models that can be a teacher, and what it reads. Only imported with --teacher.

The policy samples, and a frozen model, or the policy itself with the answer in its prompt (--teacher-prompt), gives the
probability of each token. Left out: teachers with a different vocabulary, teachers behind a network address, moving averages of
the policy, and agents, whose later conversations hold the policy's prompt.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PretrainedConfig

from rl.algorithm.args import SELF
from rl.errors import UserError
from rl.learning.batch import Batch, MicroBatch, part_of
from rl.model.attention import check_supported
from rl.model.pretrained import check_model, check_vocabulary, load_config, resolve, takes_images
from rl.ranks.dist import Ranks


def teacher_path(args, policy: str) -> str:
    """Return the path of the teacher's model. policy: the path of --model."""
    return policy if args.teacher == SELF else resolve(args.teacher)


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


class TeacherRows:
    """The policy's responses after the teacher's prompts: each micro-batch becomes such a row, the same bits if the prompts are
    the policy's. Longer prompts make a row longer than a micro-batch may be: a token takes less memory than in the update, but
    nothing limits their number."""

    def __init__(self, ids_of: Callable[[int, list[int]], Sequence[int]]):
        """ids_of: (ticket, token ids of the policy's prompt) -> token ids of the teacher's prompt."""
        self._ids_of = ids_of

    def rows(self, batch: Batch, micros: Sequence[Sequence[MicroBatch]], ranks: Ranks) -> Iterator[MicroBatch]:
        """Yield each micro-batch's responses after the teacher's prompts."""
        taught = self._with_its_prompts(batch)
        for micro in itertools.chain.from_iterable(micros):
            row = MicroBatch.of(taught, batch.seq[micro.index].unique().tolist(), ranks.device)
            yield part_of(row, ranks) if ranks.sequence_parallel > 1 else row

    def _with_its_prompts(self, batch: Batch) -> Batch:
        """Return the batch with the teacher's prompts for the responses that are here."""
        prompts = [*batch.prompts]
        of_group = {}
        for i in torch.nonzero(batch.local_lengths).flatten().tolist():
            group = int(batch.group[i])
            if group not in of_group:
                of_group[group] = np.array(self._ids_of(batch.tickets[group], batch.prompts[i].tolist()), np.int32)
            prompts[i] = of_group[group]
        nothing = [None] * len(prompts)
        return dataclasses.replace(batch, prompts=prompts, routes=nothing, prompt_routes=nothing)
