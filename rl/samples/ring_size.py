"""The check that the largest record of a run fits into its ring, made before anything is generated."""

import math

from rl.errors import UserError
from rl.model import sampling_mask
from rl.model.pretrained import empty_model, load_config
from rl.model.router import routers
from rl.transport.ring import ALIGN

MIB = 1 << 20
BYTES_PER_TOKEN = 13  # of a response: token, log-prob, version and mask; a prompt's tokens, of 4 bytes, are counted alike
HEAD_BYTES, HEAD_BYTES_PER_RESPONSE = 4096, 1024  # JSON: lengths, scores, further numbers, errors


def routes_bytes(args, path: str) -> int:
    """Return the bytes of a token's experts in a record: 0 without --router-replay R3. path: the model's."""
    if args.router_replay != "R3":
        return 0
    gates = [*routers(empty_model(load_config(path, args.trust_remote_code), args.trust_remote_code)).values()]
    return sum(gate.top_k * (1 if gate.num_experts <= 256 else 2) for gate in gates)


def largest_record(args, routes: int) -> int:
    """Return the bytes of a group (Group.to_bytes) with responses of --max-response-length and a prompt of --max-prompt-length.
    routes: bytes per token for its experts, and for the tokens that could have been sampled."""
    responses = args.rollout_n + args.needs_greedy  # records of unfinished groups include the greedy response
    tokens = args.max_prompt_length + responses * args.max_response_length
    return HEAD_BYTES + responses * HEAD_BYTES_PER_RESPONSE + tokens * (BYTES_PER_TOKEN + routes)


def ring_mb_for(record: int) -> int:
    """Return the smallest --ring-mb for a record of this many bytes, which may take almost half of the ring
    (Ring.max_record)."""
    return math.ceil(2 * (record + ALIGN) / MIB)


def check_ring(args, path: str) -> None:
    """Raise UserError if --ring-mb, which only split scripts have, is too small for the largest group. path: the model's."""
    if (split := args.schedule.split) is None:
        return
    record = largest_record(args, routes_bytes(args, path) + 4 * sampling_mask.most_tokens(args))
    if split.ring_mb < (needed := ring_mb_for(record)):
        experts = " with the experts of each (--router-replay R3)" if args.router_replay == "R3" else ""
        experts += " with the tokens that could be sampled (--keep-sampling-mask)" if args.keep_sampling_mask else ""
        raise UserError(
            f"--ring-mb {split.ring_mb}: a group of --rollout-n {args.rollout_n} responses of --max-response-length "
            f"{args.max_response_length:,} tokens{experts} takes up to {record / 1e6:,.1f} MB, and one record may have half of "
            f"the ring. Give --ring-mb {needed}: only the part in use takes memory."
        )
