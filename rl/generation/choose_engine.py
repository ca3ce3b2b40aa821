"""--engine: chooses and makes this rank's engine."""

import torch
import torch.distributed

from rl.errors import UserError
from rl.generation.embedded.engine import TransformersEngine
from rl.generation.engine import Engine, EngineArgs
from rl.model.pretrained import end_token_ids, load_tokenizer
from rl.ranks.device import is_accelerator


def make_engine(
    path: str,
    args: EngineArgs,
    max_length: int,
    learner_dtype: str,
    device: torch.device,
    trust_remote_code: bool,
    adapters=None,
) -> Engine:
    """Return the engine that the flags ask for, loaded from `path`. Raise UserError if that is impossible. adapters: for an
    engine that gets adapters without the model's weights (--publish adapter)."""
    dtype = args.weights_dtype(learner_dtype)
    chosen = choose_engine(args.engine, device)
    if args.rollout_tp != 1 and chosen != "vllm":
        raise UserError(f"--rollout-tp {args.rollout_tp}: tensor parallel generation needs --engine vllm.")
    end_tokens = end_token_ids(path, load_tokenizer(path, trust_remote_code), trust_remote_code)
    if chosen == "vllm":
        from rl.generation.vllm.engine import VLLMEngine

        what = (path, args, max_length, dtype, device, trust_remote_code, end_tokens)
        if adapters:
            from rl.generation.vllm.adapters import AdaptedVLLMEngine

            return AdaptedVLLMEngine(*what, adapters=adapters)
        return VLLMEngine(*what)
    return TransformersEngine(
        path,
        max_length=max_length,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        end_tokens=end_tokens,
        router=args,
        adapters=adapters,
    )


def choose_engine(wanted: str, device: torch.device) -> str:
    """Return "vllm" or "embedded". The choice of auto is printed once per job. Raise UserError if vLLM is missing."""
    if wanted == "embedded" or (wanted == "auto" and not is_accelerator(device)):
        chosen, why = "embedded", "the device is a CPU"
    else:
        try:
            from rl.generation.vllm.engine import vllm

            chosen = "vllm"
            why = f"version {vllm.__version__} is installed"
        except (ImportError, OSError) as error:  # OSError: a library of another CUDA version
            if wanted == "vllm":
                remedy = "Install requirements-cuda.txt or requirements-npu.txt (docs/engines.md), or take --engine embedded."
                raise UserError(f"--engine vllm: vLLM cannot be imported here ({error}). {remedy}") from None
            chosen = "embedded"
            why = f"vLLM cannot be imported: {error}"
    if wanted == "auto" and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(f"engine: {chosen} ({why})", flush=True)
    return chosen
