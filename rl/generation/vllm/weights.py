"""Loads new weights into a running vLLM, and reads them back.

vLLM's tensors are not a checkpoint's: q, k and v are one tensor, and so are gate and up, and all experts of a layer.
`LiveWeights.load` takes a checkpoint's tensors, and `LiveWeights.read_back` returns them. Left out: reading expert weights in a
kernel's own layout, which those of a CPU always have.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import vllm
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from rl.generation.engine import checked
from rl.model.attention import IN_FP32, dtype_of
from rl.ranks.device import is_accelerator

EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}  # transformers' name -> vLLM's, same layout
TRANSPOSED_EXPERTS = ("AscendUnquantizedFusedMoEMethod",)  # methods that compute with [E, in, out]
PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")  # backends that keep transformers' layout


class LiveWeights:
    """The weights of one vLLM engine under the learner's names and shapes, `expected`."""

    def __init__(self, engine: "vllm.LLMEngine", expected: dict[str, torch.Tensor], dtype: torch.dtype, tensor_parallel: int):
        self.config = engine.vllm_config
        self.dtype = dtype
        self.tensor_parallel = tensor_parallel
        self.shapes = {name: tensor.shape for name, tensor in expected.items()}
        self.worker = engine.model_executor.driver_worker.worker
        self.model: nn.Module = self.worker.model_runner.get_model()
        self.modules = dict(self.model.named_modules())
        self.on_cpu = not is_accelerator(torch.device(self.worker.device))
        # Qwen3-VL-MoE's loader takes experts [E, in, out], as the hub has them; transformers' are [E, out, in].
        self.turns_experts = any(getattr(m, "is_fused_checkpoint_transposed", False) for m in self.modules.values())

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace every weight. Raise ValueError, naming the first one that is missing, unknown or of a wrong shape; the
        engine's weights are then undefined until the next load."""
        if self.on_cpu:
            self._forget_packed_experts()
        with set_current_vllm_config(self.config), torch.device(self.worker.device):
            try:
                self.worker.model_runner.reload_weights(weights_iterator=self._checked(weights))
            except Exception:
                finalize_layerwise_reload(self.model, self.config.model_config)  # or layers stay half dismantled
                raise
        if self.on_cpu:
            self._repack_heads()

    @contextlib.contextmanager
    def same_parameters(self):
        """Restore the modules' parameters after a wake-up. There vllm-ascend transposes the experts', and reloading would
        copy into the wrong shape, or silently into the wrong elements. Memory wakes up at its old address."""
        before = [(module, name, p) for module in self.modules.values() for name, p in module.named_parameters(recurse=False)]
        yield
        for module, name, parameter in before:
            if getattr(module, name) is not parameter:
                setattr(module, name, parameter)

    def _checked(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the weights: vLLM keeps them until a fused group is whole, while the sender may reuse its buffer.
        Names are checked here, because vLLM silently skips unknown or missing weights."""
        iterator = checked(weights, self.shapes)
        while True:
            with torch.device("cpu"):  # the sender's code must not have the engine's device as its default
                item = next(iterator, None)
            if item is None:
                return
            name, tensor = item
            tensor = tensor.detach().to(self.worker.device, dtype_of(name, self.dtype), copy=True)
            turn = self.turns_experts and name.rpartition(".")[2] in EXPERTS
            yield name, tensor.transpose(1, 2) if turn else tensor

    def _forget_packed_experts(self) -> None:
        """Drop the experts' kernels on a CPU. vLLM only packs expert weights if no kernel exists yet, and otherwise copies
        unpacked weights over the packed ones: log-probs after an update would silently be off by 0.75."""
        for module in self.modules.values():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None

    def _repack_heads(self) -> None:
        """Pack the output heads again on a CPU. A head that is tied to the input embeddings keeps a packed copy of the old
        ones: log-probs after an update would silently be off by up to 2.2."""
        for module in self.modules.values():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    @torch.no_grad()
    def read_back(self, name: str) -> torch.Tensor | None:
        """Return the engine's tensor of the learner's weight `name`, bit for bit, in the learner's shape and the engine's
        precision; on a tensor parallel rank, `own_part` of it. It may share memory with the engine.

        A CPU packs its matrices: they are read by multiplying the identity with them, which turns -0.0 into 0.0. Compare by
        value, or add 0.0 before a checksum. None if vLLM does not show the value. Raise KeyError for an unknown name.
        """
        module, leaf, front = self.holder(name)
        if leaf in EXPERTS:
            return self._experts(module, leaf)
        own = self._own_shape(name)
        unpacked = getattr(module, "_cpu_unpacked_conv_weight", None)  # of a delta net's convolution
        if unpacked is not None:
            return unpacked.view(own)
        start = sum(self._own_shape(part)[0] for part in front)
        value = self._matrix(module, leaf)[start : start + own[0]]  # a vocabulary is padded
        return value if value.shape == own or self.tensor_parallel == 1 else None

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the learner's weight `name`, given the whole; it is less only with tensor parallelism."""
        module, leaf, front = self.holder(name)
        if name.endswith(IN_FP32):  # vLLM has some of them in the model's precision
            whole = whole.to(getattr(module, leaf).dtype).to(whole.dtype)
        count, number = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
        if count == 1 or leaf in EXPERTS or isinstance(module, ReplicatedLinear):  # a router
            return whole
        if isinstance(module, VocabParallelEmbedding):
            return whole[module.shard_indices.org_vocab_start_index : module.shard_indices.org_vocab_end_index]
        if isinstance(module, RowParallelLinear):
            return whole.chunk(count, 1)[number] if leaf == "weight" else whole
        if front:  # ranks may share heads of keys and values
            replicas = getattr(module, "num_kv_head_replicas", 1)
            count, number = count // replicas, number // replicas
        return whole.chunk(count)[number]

    def _own_shape(self, name: str) -> torch.Size:
        return self.own_part(name, torch.empty(self.shapes[name], device="meta")).shape

    def holder(self, name: str) -> tuple[nn.Module, str, list[str]]:
        """Return the module that holds the learner's weight, the weight's name there and the learner's names of those that vLLM
        puts before it, in one tensor. One of them may be several of vLLM's parts, like q, k and v of a delta net."""
        path, _, leaf = self.vllms_name(name).rpartition(".")
        parent, _, child = path.rpartition(".")
        if leaf in EXPERTS:
            return self.modules.get(f"{path}.routed_experts", self.modules[path]), leaf, []  # older vLLM: the layer itself
        for fused, parts in getattr(self.model, "packed_modules_mapping", {}).items():
            module = self.modules.get(f"{parent}.{fused}")
            if child in parts and fused != child and module is not None:  # a vision tower's qkv is one tensor on both sides
                before = name.removesuffix(f".{child}.{leaf}")
                return module, leaf, [f"{before}.{part}.{leaf}" for part in parts[: parts.index(child)]]
        return self.modules[path], leaf, []

    def vllms_name(self, name: str) -> str:
        """Return the learner's name with vLLM's prefix, which is not transformers' for models that take images."""
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        for theirs, ours in (mapper.orig_to_new_prefix if mapper else {}).items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def _matrix(self, module: nn.Module, leaf: str) -> torch.Tensor:
        """Return a module's parameter [out, in], from a CPU's packed copy if the product is computed with one."""
        looked_up = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        if leaf != "weight" or looked_up or not hasattr(module, "cpu_linear"):
            return getattr(module, leaf).data
        width = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None) or module.embedding_dim
        return module.cpu_linear(torch.eye(width, dtype=self.dtype), module.weight, None).t()

    def _experts(self, module: nn.Module, leaf: str) -> torch.Tensor | None:
        """Return all experts' weights [E, out, in] of one layer."""
        live = getattr(module, EXPERTS[leaf]).data
        if self.on_cpu or self.tensor_parallel > 1:
            return None
        if type(module.quant_method).__name__ in TRANSPOSED_EXPERTS:
            return live.transpose(1, 2)
        backend = getattr(module.quant_method, "unquantized_backend", None)
        return live if getattr(backend, "name", None) in PLAIN_EXPERTS else None
