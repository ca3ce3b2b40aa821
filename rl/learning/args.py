"""The flags of the learners."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.adapters.lora import AdapterArgs
from rl.errors import UserError
from rl.learning.optimizer import OptimizerArgs
from rl.model.pretrained import RouterArgs
from rl.ranges import MayChange, Range
from rl.ranks.device import default_dtype


@dataclass
class LearnerArgs(AdapterArgs, OptimizerArgs, RouterArgs):
    """Precision, memory and layout of the learners."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation; auto is bfloat16 on an accelerator and float32 on a CPU. Master weights are always fp32;
    so are gradients and the optimizer's moments unless --grad-dtype and --optim say otherwise."""
    gradient_checkpointing: MayChange[bool] = False
    """Recompute each layer's activations, and logits of a large vocabulary, in the backward pass. Takes less memory and about a
    third more time."""
    compile: MayChange[bool] = False
    """Compile the learner's decoder layers (torch.compile), for updates that are about a sixth faster. Compiling takes tens of
    seconds, or a few with a warm cache on disk. It needs a C++ compiler on a CPU and Triton on a GPU."""
    param_offload: MayChange[bool] = False
    """Keep parameters, gradients and optimizer state in host memory."""
    activation_offload: MayChange[bool] = False
    """Keep each layer's input, which --gradient-checkpointing saves, in host memory until the backward pass."""
    ref_offload: MayChange[bool] = True
    """Keep the reference policy and the teacher in host memory while they are not in use (accelerators only)."""
    max_tokens_per_micro_batch: MayChange[Annotated[int | Literal["auto"], Range(at_least=1, also="auto")]] = "auto"
    """Most tokens, of prompts and responses, in a packed micro-batch on one rank. auto: as many as the accelerator's memory
    holds (8,192 with images), or as many as are fastest on a CPU. At least one sequence of full length."""
    sequence_parallel: MayChange[Annotated[int, Range(at_least=1)]] = 1
    """Learners that share each packed micro-batch, for sequences that do not fit on one (Ulysses). A micro-batch then has up to
    this many times --max-tokens-per-micro-batch tokens."""
    expert_parallel: MayChange[Annotated[int, Range(at_least=1)]] = 1
    """Learners that share the experts of each layer: tokens are sent to their experts. With 1, each learner gathers all
    experts."""
    ppo_epochs: Annotated[int, Range(at_least=1)] = 1
    """Passes over each batch."""
    freeze_vision_tower: bool = False
    """Do not train the vision tower of a model that takes images. It is published once."""

    def __setattr__(self, name: str, value):  # no __post_init__, which one of a fork would replace
        super().__setattr__(name, default_dtype() if (name, value) == ("dtype", "auto") else value)

    @property
    def masters_on_host(self) -> bool:
        """Whether the fp32 weights are in host memory, and the device has them in bf16 (rl/learning/masters.py)."""
        return self.optimizer_offload and self.dtype == "bfloat16"

    def check(self) -> None:
        """Raise UserError for flags that exclude each other, or that cannot have an effect."""
        if self.optimizer_offload and self.param_offload:
            raise UserError(
                "--optimizer-offload: --param-offload keeps the moments in host memory already. Leave one of them out."
            )
        if self.activation_offload and not self.gradient_checkpointing:
            raise UserError(
                "--activation-offload moves the inputs that --gradient-checkpointing keeps; all activations are too much to "
                "move. Add --gradient-checkpointing."
            )
