"""The flags of the learners."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.errors import UserError
from rl.parts import Part
from rl.ranges import MayChange, Range
from rl.ranks.device import default_dtype


@dataclass(frozen=True)
class OptimizerArgs(Part):
    """The optimizer."""

    lr: Annotated[float, Range(above=0, at_most=1)] = 1e-4
    """Peak learning rate of AdamW. The default suits the demo; billions of parameters want 1e-6."""
    lr_warmup_steps: Annotated[int, Range(at_least=0)] = 10
    """Training steps over which the rate rises linearly to --lr: of W steps the first trains with --lr / W, the last with --lr.
    All optimizer steps of a training step have the same rate."""
    lr_scheduler_type: Literal["constant", "cosine"] = "cosine"
    """Learning rate after the warm-up: constant, or falling along a cosine to --min-lr-ratio times --lr."""
    min_lr_ratio: Annotated[float, Range(at_least=0, at_most=1)] = 0.0
    """Last learning rate of the cosine, as a fraction of --lr."""
    weight_decay: Annotated[float, Range(at_least=0)] = 0.01
    """AdamW's decoupled weight decay."""
    adam_beta2: Annotated[float, Range(at_least=0, below=1)] = 0.999
    """AdamW's decay of the second moment; that of the first one is 0.9."""
    grad_clip: Annotated[float, Range(above=0)] = 1.0
    """Largest global norm of the gradient; a larger one is scaled down to it."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw keeps two fp32 moments of each parameter, 8 bytes; adamw_8bit keeps them in 8 bits, 2 bytes."""
    optimizer_offload: MayChange[bool] = False
    """Keep the moments in host memory. Each optimizer step moves them to the device and back, one piece at a time."""


@dataclass(frozen=True)
class AdapterArgs(Part):
    """Adapters (LoRA): the model is frozen, and thin matrices next to its linear layers are trained."""

    lora_rank: Annotated[int, Range(at_least=0)] = 0
    """Rank of the adapters; 0 trains all weights. Adapters need about ten times the --lr of all weights: 1e-3 for the demo, and
    at least 1e-5 for billions of parameters."""
    lora_alpha: Annotated[float, Range(above=0)] = 32.0
    """The adapters' product is multiplied by alpha / rank."""
    lora_target: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter: all-linear for all linear layers of the decoder, or suffixes of their names (q_proj
    v_proj)."""

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained."""
        return self.lora_rank > 0

    def check(self, args) -> None:
        """Raise UserError if no layer is named."""
        if not self.lora_target:
            raise UserError("--lora-target names no layer. Give all-linear, or names such as q_proj v_proj.")


@dataclass(frozen=True)
class LearnerArgs(AdapterArgs, OptimizerArgs):
    """Precision, memory and layout of the learners."""

    _field = "learner"

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation; auto is bfloat16 on an accelerator and float32 on a CPU. Weights that are trained and
    gradients are always fp32; so are the optimizer's moments unless --optim says otherwise."""
    gradient_checkpointing: MayChange[bool] = False
    """Recompute each layer's activations, and logits of a large vocabulary, in the backward pass. Takes less memory and about a
    third more time."""
    compile: MayChange[bool] = False
    """Compile the learner's decoder layers (torch.compile), for updates that are about a sixth faster. Compiling takes tens of
    seconds, or a few with a warm cache on disk. It needs a C++ compiler on a CPU and Triton on a GPU."""
    param_offload: MayChange[bool] = False
    """Keep parameters, gradients and optimizer state in host memory."""
    max_tokens_per_micro_batch: MayChange[Annotated[int, Range(at_least=1)]] = 8192
    """Most tokens, of prompts and responses, in a packed micro-batch on one rank. It must hold one prompt and response of full
    length. Larger micro-batches take more memory and less time."""
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
    router_replay: Literal["off", "R2", "R3"] = "off"
    """Train each token with the experts of a mixture that were chosen for it before: R2 when its old log-prob was computed, R3
    when the generator sampled it. off chooses again in every pass."""

    def __post_init__(self):
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", default_dtype())

    def check(self, args) -> None:
        """Raise UserError for flags that exclude each other."""
        if self.optimizer_offload and self.param_offload:
            raise UserError(
                "--optimizer-offload: --param-offload keeps the moments in host memory already. Leave one of them out."
            )
