"""The log-probs of a few fixed tokens, with and without adapters, that an engine must compute with the adapters it is sent.

rl/weights/adapter_proof.py compares an engine with them at every publish.
"""

from functools import cached_property

import numpy as np
import torch

from rl.adapters.lora import WithoutAdapters
from rl.learning.batch import Batch, MicroBatch, part_of
from rl.learning.learner import Learner
from rl.model.sequence_parallel import gather_log_probs
from rl.model.vision_forward import row_inputs
from rl.samples.group import Group, Response
from rl.weights.adapter_proof import NOISE, TOKENS


class NoImages:
    """The images of a text-only batch, for a model that takes images (rl/learning/batch_images.py)."""

    def inputs(self, lengths: list[int], after: list[int], groups: list[int], device: torch.device) -> dict:
        inputs = row_inputs(lengths, after, [None] * len(lengths))
        return inputs | {"position_ids": inputs["position_ids"].to(device)}


class AdapterProbe:
    """The probe of one learner. Its tokens are meaningless, from the middle of the vocabulary, where none is special."""

    def __init__(self, learner: Learner):
        self._learner = learner
        rows = learner.config.get_text_config().vocab_size
        self.ids = [rows // 4 + 7919 * place % max(1, rows // 2) for place in range(TOKENS)]
        self._base: list[float] | None = None  # the model without adapters, which never changes
        self._before: list[float] | None = None  # with the adapters of the last call

    def __call__(self) -> dict:
        """Return the tokens `ids`; the log-probs of all but the first at temperature 1, in nats: without adapters (`base`),
        with those of the last call (`before`), and with the current ones (`now`); and the `noise` of this precision. A
        collective of the learners; all return the same."""
        policy = self._learner.policy
        if self._base is None:
            self._base = self._log_probs(WithoutAdapters(policy))
        now = self._log_probs(policy)
        before = self._before
        self._before = now
        return {
            "ids": self.ids,
            "base": self._base,
            "before": before or self._base,
            "now": now,
            "noise": NOISE[getattr(torch, self._learner.args.dtype)],
        }

    @torch.no_grad()
    def _log_probs(self, model) -> list[float]:
        micro = self._micro
        ranks = self._learner.ranks
        own = model(micro.inputs, micro.layout, micro.predict, micro.labels, 1.0, "none")
        log_prob, _ = own if micro.own is None else gather_log_probs(micro, ranks, *own)
        self._learner.policy.reshard()
        return log_prob.tolist()

    @cached_property
    def _micro(self) -> MicroBatch:
        answer = np.array(self.ids[1:], np.int32)
        nothing = np.zeros(len(answer), np.int32)
        response = Response(answer, nothing.astype(np.float32), nothing, "length")
        batch = Batch.of([Group(0, np.array(self.ids[:1], np.int32), "probe", [response])])
        ranks = self._learner.ranks
        batch.images = NoImages() if self._learner.policy.takes_images else None
        micro = MicroBatch.of(batch, [0], ranks.device)
        return part_of(micro, ranks) if ranks.sequence_parallel > 1 else micro
