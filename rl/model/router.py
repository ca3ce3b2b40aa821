"""The routers of a mixture of experts: they choose the experts of each token, or replay recorded choices.

Generator and learner compute a little differently, and where two experts are about equal this sends a token to a different one:
the log-probs then differ by far more than rounding (arXiv 2510.11370). `Router` replaces every router of a model. It chooses
freely, or replays a record of choices ("routes": the K experts of every token in every mixture layer), and it returns the last
choices. Replayed experts are weighted by the model's own probabilities, so that the router still learns.

With gradient checkpointing the backward pass computes each layer again, with the experts of the forward pass: other experts
would change shapes within the graph. No auxiliary loss is added. Left out: routers other than a softmax over all experts of
which the K largest are taken (such as DeepSeek's), which cannot be replayed here.
"""

import re
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rl.errors import UserError
from rl.ranks.dist import all_reduce_sum

FAMILIES = ("Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3VLMoeText", "Qwen3_5Moe")
KNOWN = {f"{family}TopKRouter" for family in FAMILIES}  # classes of transformers
UNKNOWN = -1  # in routes to be replayed: a token without a record chooses freely


class Router:
    """All routers of one model: their forward passes become methods of this class. It only knows the last forward pass."""

    @staticmethod
    def of(model: nn.Module) -> "Router | None":
        """None for a model without known routers."""
        return Router(model) if routers(model) else None

    def __init__(self, model: nn.Module):
        self.gates = list(routers(model).values())
        self.experts, self.per_token = self.gates[0].num_experts, self.gates[0].top_k  # E, K
        for number, (layer, gate) in enumerate(routers(model).items()):
            model.get_submodule(layer).register_forward_pre_hook(self._enter, with_kwargs=True)
            gate.forward = partial(self._forward, number)
        self._entered = self._layout = None
        self._chosen: list[torch.Tensor | None] = []  # of the last forward pass, [T, K] a layer
        self._routes: torch.Tensor | None = None  # [T, L, K] to be replayed
        self._load: torch.Tensor | None = None  # [L, E] tokens that went to each expert since the last report
        self._sums = [0.0] * 4  # since the last report: see `metrics`
        self._differs: torch.Tensor | None = None  # [T] tokens for which a replay has changed an expert in some layer so far

    def begin(self, layout, routes: torch.Tensor | None = None, observe: int = 0) -> None:
        """Announces a forward pass. layout: the one that the model's forward gets; routes: [T, L, K] to be replayed, UNKNOWN in
        rows that choose freely; observe: how many of the first rows are counted for the metrics."""
        self._entered = self._layout = layout
        self._chosen = [None] * len(self.gates)
        self._routes = routes
        self._observes = observe
        self._differs = None

    def chosen(self) -> torch.Tensor:
        """The routes of the last forward pass: [T, L, K] int16 on the CPU, the likeliest expert first where it chose freely."""
        return torch.stack(self._chosen, dim=1).to(torch.int16).cpu()

    # -- the routers' forward pass

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        self._entered = kwargs.get("layout")

    def _forward(self, number: int, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden_states [..., hidden] -> (logits [T, E], weights [T, K], experts [T, K]), as transformers' routers."""
        gate = self.gates[number]
        hidden = hidden_states.reshape(-1, gate.hidden_dim)
        logits = F.linear(hidden.float(), gate.weight.float())  # in bf16 close experts would change places
        probs = logits.softmax(-1, dtype=torch.float32)
        experts = self._choose(number, probs)
        weights = probs.gather(1, experts)
        if getattr(gate, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(hidden.dtype), experts

    def _choose(self, number: int, probs: torch.Tensor) -> torch.Tensor:
        """probs [T, E] -> experts [T, K]."""
        probs = probs.detach()  # in a graph, topk would keep a tensor that the recomputation, which skips it, lacks
        if self._entered is None:  # not announced: a check at the start (rl/model/policy.py)
            return probs.topk(self.per_token).indices
        if self._entered is not self._layout:
            raise RuntimeError("a layer is computed again after another forward pass, which has replaced its experts")
        if (again := self._chosen[number]) is not None:
            return again
        own = experts = probs.topk(self.per_token).indices
        if self._routes is not None:
            recorded = self._routes[:, number].long()
            experts = torch.where(recorded[:, :1] == UNKNOWN, own, recorded)
        self._chosen[number] = experts
        if self._observes:
            counted = slice(self._observes)
            self._observe(number, probs[counted], own[counted], experts[counted])
        return experts

    # -- metrics

    def _observe(self, number: int, probs: torch.Tensor, own: torch.Tensor, experts: torch.Tensor) -> None:
        if self._load is None:
            self._load = torch.zeros(len(self.gates), self.experts, dtype=torch.long, device=probs.device)
        chosen = experts.flatten()
        self._load[number].scatter_add_(0, chosen, torch.ones_like(chosen))  # bincount waits for the device
        self._sums[0] -= torch.xlogy(probs, probs).sum()
        if self._routes is None:
            return
        elsewhere = (own.sort().values != experts.sort().values).any(1)  # [T]
        self._sums[1] += elsewhere.sum()
        self._differs = elsewhere if self._differs is None else self._differs | elsewhere
        if number == len(self.gates) - 1:
            self._sums[2] += self._differs.sum()
            self._sums[3] += (self._routes[: len(experts), 0, 0] != UNKNOWN).sum()

    def metrics(self) -> dict[str, float]:
        """The moe/* of docs/metrics.md, over the forward passes observed since the last call on all ranks. A collective."""
        load = torch.zeros(len(self.gates), self.experts) if self._load is None else self._load.cpu()
        totals = all_reduce_sum(torch.cat([load.flatten().double(), torch.tensor([float(x) for x in self._sums]).double()]))
        self._load = None
        self._sums = [0.0] * 4
        load, (entropy, elsewhere, differing, replayed) = totals[:-4].view(load.shape), totals[-4:].tolist()
        choices = float(load.sum()) / self.per_token  # tokens times layers
        if not choices:
            return {}
        relative = load / load.mean(1, keepdim=True)  # 1 is an even share
        out = {
            "moe/load/max": float(relative.max()),
            "moe/load/min": float(relative.min()),
            "moe/load/std": float(relative.std(1, correction=0).mean()),
            "moe/never_used": int((load == 0).sum()),
            "moe/router_entropy": entropy / choices,
        }
        if replayed:
            out["moe/replay/tokens_differ"] = differing / replayed
            out["moe/replay/choices_differ"] = elsewhere / replayed / len(self.gates)
        return out


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Layer's name -> its router, for all known routers in the layers' order."""
    gates = {name: module for name, module in model.named_modules() if type(module).__name__ in KNOWN}
    return {re.match(r".*layers\.\d+", name)[0]: gate for name, gate in gates.items()}


def check_replay(args, model: nn.Module, where: str) -> None:
    """Raises UserError if the model, whose routes are to be replayed, has no known router."""
    if not routers(model):
        raise UserError(
            f"{where}: --router-replay {args.learner.router_replay}, but {type(model).__name__} has no router that can be "
            f"replayed here (known are those of {', '.join(FAMILIES)}). Leave it out."
        )


# ------------------------------------------------------------------------------------------------------------- records


def as_record(routes: torch.Tensor, experts: int) -> np.ndarray:
    """Routes [..., K] on the CPU in the form in which they travel: uint8, or uint16 for more than 256 experts."""
    return routes.numpy().astype(np.uint8 if experts <= 256 else np.uint16)


def check_record(routes: np.ndarray) -> None:
    """Raises UserError unless every token goes to K different experts: an engine may return zeros if a kernel says nothing."""
    ordered = np.sort(routes, axis=-1)  # [T, L, K]
    wrong = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(-1))
    if len(wrong):
        token, layer = wrong[0].tolist()
        raise UserError(
            f"--router-replay R3: the engine says that token {token} of a sequence went to the experts "
            f"{routes[token, layer].tolist()} in mixture layer {layer}, one of them twice: its routes cannot be replayed. Take "
            "another version of the engine, or --router-replay R2 or off."
        )


def routes_for(args, micro, device: torch.device) -> torch.Tensor | None:
    """The routes that the micro-batch replays, on the device. Raises UserError if the generator's are wanted and missing."""
    if args.router_replay == "R3" and micro.routes is None and micro.has_responses:
        raise UserError("--router-replay R3: the samples came without their routes. Generate them with the same flag.")
    return None if micro.routes is None else micro.routes.to(device)


def row_of_routes(batch, responses: list[int]) -> torch.Tensor:
    """The routes of a packed row as rl/learning/batch.py lays it out: [T, L, K] int16, UNKNOWN where nothing is recorded. The
    last token of a response was never an input of the generator's model."""
    known = next(rows for rows in [*batch.prompt_routes, *batch.routes] if rows is not None)
    parts = []
    seen = set()

    def add(rows: np.ndarray | None, tokens: int) -> None:
        part = np.full((tokens, *known.shape[1:]), UNKNOWN, np.int16)
        if rows is not None:
            part[: len(rows)] = rows
        parts.append(part)

    for i in responses:
        if (group := int(batch.group[i])) not in seen:
            seen.add(group)
            add(batch.prompt_routes[i], len(batch.prompts[i]))
        add(batch.routes[i], int(batch.lengths[i]))
        ends = np.cumsum(batch.histories[i] or [], dtype=int)[:-1]  # neither was the last token of a history
        parts[-1][ends[ends > 0] - 1] = UNKNOWN
    return torch.from_numpy(np.concatenate(parts))
