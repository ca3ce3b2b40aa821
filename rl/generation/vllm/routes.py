"""The experts that a running vLLM chooses for each token, for --router-replay R3 (rl/model/router.py).

On accelerators vLLM returns them with each response (enable_return_routed_experts, from 0.32 on). Its CPU build does not: there
the routers' capture hook is read after each forward pass, and prompts share no KV, because only computed tokens have routes.
Both keep the first choice if a response's KV is recomputed under new weights.
"""

import numpy as np
import torch
import vllm
from vllm.distributed.parallel_state import get_tp_group

from rl.model.router import as_record, routers


def settings_of_routes(on_accelerator: bool) -> dict[str, object]:
    """Return settings of vllm.EngineArgs."""
    return {"enable_return_routed_experts": True} if on_accelerator else {"enable_prefix_caching": False}


class ChosenExperts:
    """The routes of one engine's responses."""

    def __init__(self, engine: "vllm.LLMEngine", model: torch.nn.Module, on_cpu: bool):
        """model: transformers' model of the same config, which shows the layers with routers."""
        self.engine = engine
        self.layers = [int(name.rpartition(".")[2]) for name in routers(model)]
        self.experts = next(iter(routers(model).values())).num_experts
        self._captured: dict[str, np.ndarray] | None = None  # on a CPU: request -> [m, L, K] so far
        if on_cpu:
            self._captured, self._step = {}, {}
            runner = engine.model_executor.driver_worker.worker.model_runner
            for module in runner.get_model().modules():
                if hasattr(module, "layer_id") and hasattr(getattr(module, "router", None), "set_capture_fn"):
                    module.router.set_capture_fn(lambda ids, layer=module.layer_id: self._capture(runner, layer, ids))
            return
        scheduler = engine.engine_core.engine_core.scheduler
        if torch.distributed.is_initialized() and not get_tp_group().is_first_rank:
            # Routes only arrive on the first tensor parallel rank, but here every rank's scheduler would wait for them.
            scheduler.aux_output_connector = None

    def take(self, request: str, completion) -> np.ndarray | None:
        """Return and forget the routes [prompt + n - 1, L, K] of a finished request; None on ranks that get none."""
        if self._captured is not None:
            return self._captured.pop(request)
        return None if completion.routed_experts is None else completion.routed_experts[:, self.layers]

    def so_far(self, request: str) -> np.ndarray | None:
        """Return the routes of an unfinished request so far; None if it has not begun."""
        if self._captured is not None:
            return self._captured.get(request)
        chunks = self.engine.output_processor.request_states[request].routed_experts_chunks
        return np.concatenate(chunks)[:, self.layers] if chunks else None

    def _capture(self, runner, layer: int, ids: torch.Tensor) -> None:
        """Record a layer's choices in a forward pass, ids [tokens, K] of the concatenated requests. The last layer ends it."""
        self._step[layer] = ids.to(torch.int16).clone()
        if layer != self.layers[-1]:
            return
        rows = torch.stack([self._step[number] for number in self.layers], dim=1)
        self._step = {}
        batch = runner.input_batch
        begins = runner.query_start_loc.np
        for i, request in enumerate(batch.req_ids):
            known = self._captured.get(request)
            first = int(batch.num_computed_tokens_cpu[i])
            new = as_record(rows[begins[i] : begins[i + 1]], self.experts)
            if first > (have := 0 if known is None else len(known)):
                raise RuntimeError(f"request {request}: the experts of tokens {have} to {first} were never reported")
            self._captured[request] = new if known is None else np.concatenate([known, new[have - first :]])
