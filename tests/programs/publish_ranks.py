"""Started under torchrun by test_split.py: learners change their weights and publish them, and one generator samples with each
version. Prints, per version, how far the generator's log-probs are from the learners' forward pass.

    torchrun ... publish_ranks.py MODEL DTYPE [NAME]      NAME: a parameter that the generator's engine does not take
"""

import sys

import numpy as np
import torch
from helpers import drain, response_of

from rl.generation.embedded.engine import TransformersEngine
from rl.generation.engine import Request, SamplingParams
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.division import Division
from rl.learning.learner import Learner
from rl.learning.micro_batches import micro_batches
from rl.ranks import process
from rl.ranks.dist import all_gather_values
from rl.ranks.shards import local
from rl.samples.channel import ControlBlock, Inbox, Outbox
from rl.samples.group import Group
from rl.split import Split, init_split
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber

VERSIONS = 4
model, dtype, skipped = sys.argv[1], getattr(torch, sys.argv[2]), (*sys.argv[3:], None)[0]


def learn(split: Split) -> None:
    learner = Learner(model, LearnerArgs(), split.ranks, total_steps=1)
    publisher, board, inbox = Publisher(learner, split, dtype), ControlBlock(split), Inbox(split)
    torch.manual_seed(split.ranks.rank)
    for version in range(VERSIONS):
        if version:
            learner.policy.reshard()
            with torch.no_grad():
                for parameter in learner.policy.parameters():
                    own = local(parameter)
                    own += 0.02 * torch.randn_like(own)
        publisher.publish(version)
        board.update(version=version)
        while not inbox.groups:
            inbox.receive()
        batch = Batch.of([inbox.groups.popleft()], Division(1, 512, split.ranks))
        micros = micro_batches(batch, torch.arange(len(batch.lengths)), 512, split.ranks)
        log_prob = learner.log_probs_of("policy", batch, [micros])
        differences = all_gather_values(
            float((log_prob - batch.rollout_log_prob).abs().max()) if len(log_prob) else 0.0, split.ranks.data_group
        )
        assert set(batch.version.tolist()) <= {version}
        if split.ranks.is_main:
            print(f"version {version} differs by {max(differences):.2e}", flush=True)
    publisher.wait()


def generate(split: Split) -> None:
    engine = TransformersEngine(model, max_length=64, dtype=dtype)
    outbox = Outbox(split)
    board, subscriber = ControlBlock(split), Subscriber(split, engine)
    if skipped:
        load, own = engine.update, engine.read_back(skipped)

        def forgetful(weights, version, recompute_kv):
            if version == 1:
                own.data = own.clone()  # where no weights arrive
            load(((name, own if name == skipped and version else tensor) for name, tensor in weights), version, recompute_kv)

        engine.update = forgetful
    prompt, sampling = [5, 6, 7], SamplingParams(max_tokens=24, ignore_eos=True)
    for version in range(VERSIONS):
        board.wait_for(version)
        subscriber.receive(version)
        outputs = drain(engine, [Request(i, prompt, sampling, seed=100 * version + i) for i in range(4)])
        outbox.send_group(Group(version, np.array(prompt, np.int32), "demo", [*map(response_of, outputs.values())]))


process.run(lambda split: (learn if split.role == "learner" else generate)(split), join=lambda: init_split(1))
