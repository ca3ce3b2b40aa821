"""Writing the policy as an ordinary Hugging Face directory. (Resuming is not here yet.)"""

import os
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedTokenizerBase

from rl import dist
from rl.learner import Learner


def export_hf(learner: Learner, tokenizer: PreTrainedTokenizerBase, target: Path) -> Path:
    """Weights in the model's own dtype, config, tokenizer and chat template under `target`, on rank 0; all ranks take part.

    Written beside the target and renamed, so that a kill leaves no half-written directory. Raises OSError (disk full, no
    permission).
    """
    work = target.with_name(f"{target.name}.partial")
    dtype = learner.config.dtype or torch.float32
    weights = {}
    for name, tensor in learner.weights():
        if learner.ranks.is_main:
            weights[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    if learner.ranks.is_main:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        learner.config.save_pretrained(work)
        learner.policy.model.generation_config.save_pretrained(work)
        tokenizer.save_pretrained(work)
        save_torch_state_dict(weights, work)  # in shards of 5 GB
        shutil.rmtree(target, ignore_errors=True)
        os.rename(work, target)
    dist.barrier()
    return target
