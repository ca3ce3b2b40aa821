"""The weights of a model, read from its safetensors files: each learner's part, or all of them for the embedded engine.

Each rank reads the rows of its part, in the files' precision, and casts them as they arrive: no rank, the first included, ever
holds the model. Parameters that files hold in another form than a model in memory, such as a layer's experts, are made whole
one at a time. For the check at the start (rl/model/policy.py), the first rank holds one layer at a time.

Left out: weights in other formats, or quantized. They are refused.
"""

import contextlib
import functools
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from rl.errors import UserError
from rl.hub import REMEDY, SINGLE, Source, Stored, sample, sources, stored_tensors
from rl.model.pretrained import generation_config, layers, load_config, unfilled_model
from rl.ranks import dist, launch, watchdog
from rl.ranks.dist import Ranks
from rl.ranks.shards import Block, local

HARMLESS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")  # buffers that old files hold and models compute
FLOATS = ("F64", "F32", "BF16", "F16")  # in the words of safetensors


@dataclass
class Weights:
    """A model's weights, before anything is sharded."""

    where: str  # for messages
    model: PreTrainedModel  # its parameters on the meta device, its buffers on the CPU
    sources: dict[str, Source]  # by parameter or buffer
    stored: dict[str, Stored]

    def whole(self, name: str) -> torch.Tensor:
        """The parameter or buffer on the CPU, in the files' precision. Raise UserError if it is not finite."""
        source = self.sources[name]
        return source.whole(self.model, name, [self._read(part) for part in source.names])

    def part(self, name: str, block: Block) -> torch.Tensor:
        """A part of the parameter, as `whole`."""
        source = self.sources[name]
        if source.convert or not block.shape:
            return self.whole(name)[block.slices()]
        return self.stored[source.names[0]].data[block.slices()]

    def _read(self, name: str) -> torch.Tensor:
        file, data = self.stored[name]
        tensor = data[...]
        if (wrong := int((~tensor.isfinite()).sum())) > 0:
            raise UserError(
                f"{self.where}: {wrong:,} of the {tensor.numel():,} values of {name} in {file.name} are NaN or infinite. "
                f"{REMEDY} If they came from a training, take an earlier checkpoint."
            )
        return tensor

    @contextlib.contextmanager
    def by_layer(self) -> Iterator[None]:
        """Give the model its weights in fp32: a layer's while the layer computes, those outside of layers all the time."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        places = places_of(self.model)

        def put(parameters: Iterable[nn.Parameter], filled: bool, *_) -> None:
            for parameter in parameters:
                whole = nn.Parameter(self.whole(names[parameter]).float(), requires_grad=False) if filled else parameter
                for module, leaf in places[parameter]:
                    setattr(module, leaf, whole)

        hooks = []
        of_layers = set()
        for layer in layers(self.model):
            own = list(layer.parameters())
            hooks.append(layer.register_forward_pre_hook(functools.partial(put, own, True)))
            hooks.append(layer.register_forward_hook(functools.partial(put, own, False)))
            of_layers.update(own)
        try:
            put(places.keys() - of_layers, True)
            yield
        finally:
            put(places, False)
            for hook in hooks:
                hook.remove()


def load_weights(path: str, dtype: torch.dtype, trust_remote_code: bool = False, say: bool = True) -> PreTrainedModel:
    """Return the model with its weights, on the CPU. Raise UserError as `open_weights` does."""
    weights = open_weights(path, trust_remote_code, say)
    places = places_of(weights.model)
    for of, parameter in list(weights.model.named_parameters()):
        filled = nn.Parameter(weights.whole(of).to(dtype, copy=True))  # out of the mapped file
        for module, leaf in places[parameter]:
            setattr(module, leaf, filled)
    return weights.model.eval()


def places_of(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return the modules that have each parameter, and its names in them. Tied ones have several."""
    places = {}
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, leaf))
    return places


def open_weights(path: str, trust_remote_code: bool = False, say: bool = True, name: str = "--model") -> Weights:
    """Return the weights at `path`, a directory or a hub name. Raise UserError unless the files have all of them, in their
    shapes, and as floats. say: whether to report unused weights. name: of the flag, for a message."""
    where = f"{name} {path}"
    config = load_config(path, trust_remote_code)
    stored = stored_tensors(path, name)
    if stored is None or getattr(config, "quantization_config", None):
        reason = "they are quantized" if stored else f"there is no {SINGLE}"
        raise UserError(f"{where}: the weights cannot be read: {reason}. Save them in bfloat16 with save_pretrained.")
    model = unfilled_model(config, trust_remote_code)
    try:
        found = sources(model, {name: of.shape for name, of in stored.items()})
    except ValueError as error:
        raise UserError(f"{where}: weights have another shape: {error}. Take config.json from the same model.") from None
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if missing := parameters.keys() - found.keys():
        raise UserError(
            f"{where}: {len(missing)} of the model's weights are not in its files, {min(missing)} first; they would be random. "
            f"{REMEDY} Or take config.json from the same model."
        )
    used = {part for source in found.values() for part in source.names}
    if wrong := sorted(part for part in used if stored[part].data.get_dtype() not in FLOATS):
        file, data = stored[wrong[0]]
        raise UserError(
            f"{where}: {wrong[0]} in {file.name} is {data.get_dtype()}, no float of 16, 32 or 64 bits, and config.json has no "
            "quantization_config that says how to read it. Take the model's own weights in bfloat16."
        )
    weights = Weights(where, model, found, stored)
    for tied in found.keys() - parameters.keys() - buffers.keys():
        first = next(n for n, p in parameters.items() if p is model.get_parameter(tied))
        if not torch.equal(weights.whole(tied).float(), weights.whole(first).float()):
            raise UserError(
                f"{where}: config.json ties {tied} to the embedding (tie_word_embeddings), but the files hold another one. "
                "Set tie_word_embeddings to false, or remove that weight."
            )
    with torch.no_grad():
        for buffer in found.keys() & buffers.keys():
            buffers[buffer].copy_(weights.whole(buffer))
    if say and (unused := sorted(name for name in stored.keys() - used if not name.endswith(HARMLESS))):
        which = f"{len(unused)} weights in the files are not used, {unused[0]} first"
        print(f"warning: {where}: {which}; checkpoints lack them.", flush=True)
    model.generation_config = generation_config(path) or GenerationConfig.from_pretrained(
        path, config_file_name="config.json", _from_model_config=True
    )
    return weights


# --------------------------------------------------------------------------------------------------------- every rank


@torch.no_grad()
def fill(model: PreTrainedModel, weights: Weights, ranks: Ranks) -> None:
    """Give this rank its part of the parameters, and all buffers. Raise UserError if nodes have other files. A collective."""
    if len(launch.nodes()) > 1:
        _check_nodes(weights)
    model.generation_config = weights.model.generation_config
    # Most buffers, such as rotary frequencies, are in no file and would be uninitialised memory. A tensor may have two names
    # here and one there, after a forward pass with LongRoPE.
    known = dict(weights.model.named_buffers(remove_duplicate=False))
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, known[name].to(ranks.device))
    for name, parameter in model.named_parameters():
        own = local(parameter.data)
        if own.numel() and not name.endswith((".lora_A", ".lora_B", "value_head")):  # an adapter's, or a critic's
            own.copy_(weights.part(name, Block.of(parameter)))
            watchdog.progress()


def _check_nodes(weights: Weights) -> None:
    found = {}
    if launch.here().local_rank == 0:
        found = {file.name: sample([file]) for file in sorted({of.file for of in weights.stored.values()})}
    (first, expected), *others = dist.all_gather_values([platform.node(), found])
    for host, held in others:
        if other := [name for name in held if held[name] != expected.get(name)]:
            raise UserError(
                f"{weights.where}: {other[0]} on {host} is not the file that {first} has. Give all nodes the same model."
            )
