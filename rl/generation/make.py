"""A rank's generator, with the engine and the responses that the flags ask for. Only these are imported."""

from collections.abc import Callable

import torch

from rl.data.job import Job
from rl.errors import UserError
from rl.generation.engine import Engine, EngineArgs, EngineRanks
from rl.generation.generator import Generator, Responses
from rl.model.pretrained import end_token_ids, load_tokenizer
from rl.ranks import dist
from rl.ranks.device import is_accelerator
from rl.rewards.pool import ScoringPool


def make_generator(
    args, job: Job, ranks: dist.Ranks, pool: ScoringPool, give_up: Callable[[], bool] = lambda: False
) -> Generator:
    """Return this rank's generator, with the engine that the flags ask for."""
    if job.environments:
        job.environments.check()
    dtype = args.engine.weights_dtype(args.learner.dtype)
    engine = make_engine(
        job.path,
        args.engine,
        args.longest[0] + max(args.longest[1], job.val_sets.longest if job.val_sets else 0),
        dtype,
        ranks.device,
        args.trust_remote_code,
        sampling=args.sampling,
        records_routes=args.learner.router_replay == "R3",
        sleeps=not args.schedule.split,
        by_priority=args.environment.has_environment,
    )
    if args.environment.has_tape:
        from user_processes.tape import Tape  # late: few runs have one

        Tape(args.environment.record_env, args.environment.from_tape).serve(pool, job.environments, engine)
    engine_ranks = EngineRanks(ranks, args.engine.rollout_tp)
    return Generator(engine, job, pool, args, engine_ranks, give_up, make_responses(args, job, engine, engine_ranks))


def make_engine(
    path: str,
    args: EngineArgs,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    *,
    records_routes: bool = False,
    **of_vllm,
) -> Engine:
    """Return the engine that the flags ask for, loaded from `path`. records_routes: of a mixture of experts; of_vllm: further
    arguments of VLLMEngine. Raise UserError if that is impossible."""
    chosen = choose_engine(args.engine, device)
    if args.rollout_tp != 1 and chosen != "vllm":
        raise UserError(f"--rollout-tp {args.rollout_tp}: tensor parallel generation needs --engine vllm.")
    end_tokens = end_token_ids(path, load_tokenizer(path, trust_remote_code), trust_remote_code)
    if chosen == "vllm":
        from rl.generation.vllm.engine import VLLMEngine

        more = of_vllm | {"records_routes": records_routes}
        return VLLMEngine(path, args, max_length, dtype, device, trust_remote_code, end_tokens, **more)
    from rl.generation.embedded import TransformersEngine

    sizes = {"max_length": max_length, "max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens}
    more = {"trust_remote_code": trust_remote_code, "end_tokens": end_tokens, "records_routes": records_routes}
    return TransformersEngine(path, dtype=dtype, device=device, **sizes, **more)


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


def make_responses(args, job: Job, engine: Engine, engine_ranks: EngineRanks) -> Responses:
    """Return responses of one turn or, with an environment, of several turns, whose code is imported only then."""
    if not args.environment.has_environment:
        return Responses(engine)
    if args.environment.has_agent:
        from rl.generation.agent_episodes import AgentEpisodes as Episodes
    else:
        from rl.generation.episodes import Episodes

    ends = end_token_ids(job.path, job.tokenizer, args.trust_remote_code)
    if args.environment.has_agent and engine_ranks.is_leader:
        job.environments.serve(engine_ranks.index)
    return Episodes(job, engine, engine_ranks, args, ends)
