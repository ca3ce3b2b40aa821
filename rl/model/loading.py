"""The weights of a model, read from its safetensors files: each learner's part, or all of them for the embedded engine.

The first rank finds out which spans of which files make up each parameter. Each rank then reads the spans of its part, in the
files' precision, and casts them as they arrive: no rank, the first included, ever holds the model. The first rank reads the
parameters that cannot be read in parts and sends them to all, one at a time: all parameters if a learner does not see the
files, or those that files hold in another form than a model in memory, such as transposed. For the check at the start
(rl/model/policy.py), it holds one layer at a time.

Left out: weights in other formats, or quantized. They are refused.
"""

import contextlib
import functools
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from rl.errors import UserError
from rl.hub.names import Source, sources
from rl.hub.tensor_reader import DTYPES, INDEX, SINGLE, FileSpan, Reader, Stored, find, read_index, sample, stored_tensors
from rl.model.attention import linear_layers
from rl.model.pretrained import generation_config, layers, load_config, unfilled_model
from rl.model.shards import Block, local
from rl.ranks import dist, launch, watchdog
from rl.ranks.dist import Ranks

MTP = "mtp."  # weights that predict further tokens, which transformers' hybrid models do not have
HARMLESS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")  # buffers that old files hold and models compute
AGAIN = "Copy or download the files again"


@dataclass
class Weights:
    """A model's weights on one rank, before anything is sharded."""

    model: PreTrainedModel  # its parameters on the meta device, its buffers on the CPU
    whole: Callable[[str], torch.Tensor]  # name -> parameter or buffer, on the CPU, in the files' precision
    spans: dict[str, list[FileSpan]]  # by parameter: its elements, end to end, if they lie so in files
    reader: Reader | None = None  # of these files

    @contextlib.contextmanager
    def by_layer(self) -> Iterator[None]:
        """Give the model its weights in fp32: a layer's while the layer computes, those outside of layers all the time."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        places = _places(self.model)

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


def load_weights(
    path: str, dtype: torch.dtype, trust_remote_code: bool = False, say: bool = True, name: str = "--model"
) -> PreTrainedModel:
    """Return the model with its weights, on the CPU. Raise UserError as `open_weights` does."""
    weights = open_weights(path, trust_remote_code, say, name)
    places = _places(weights.model)
    for of, parameter in list(weights.model.named_parameters()):
        filled = nn.Parameter(weights.whole(of).to(dtype))
        for module, leaf in places[parameter]:
            setattr(module, leaf, filled)
    return weights.model.eval()


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
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
    _check_files(Path(path), where)
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
            f"{AGAIN}, or take config.json from the same model."
        )
    used = {part for source in found.values() for part in source.names}
    if wrong := {part for part in used if not DTYPES.get(stored[part].span.dtype, torch.uint8).is_floating_point}:
        span = stored[min(wrong)].span
        raise UserError(
            f"{where}: {min(wrong)} in {span.file} is {span.dtype}, no float of 16, 32 or 64 bits, and config.json has no "
            "quantization_config that says how to read it. Take the model's own weights in bfloat16."
        )
    files = {file: find(path, file) for file in {stored[part].span.file for part in used}}
    reader = Reader(files)
    whole = functools.partial(_whole, where, model, found, stored, reader)
    for tied in found.keys() - parameters.keys() - buffers.keys():
        first = next(n for n, p in parameters.items() if p is model.get_parameter(tied))
        if not torch.equal(whole(tied).float(), whole(first).float()):
            raise UserError(
                f"{where}: config.json ties {tied} to the embedding (tie_word_embeddings), but the files hold another one. "
                "Set tie_word_embeddings to false, or remove that weight."
            )
    with torch.no_grad():
        for buffer in found.keys() & buffers.keys():
            buffers[buffer].copy_(whole(buffer))
    if say:
        _say_unused(where, config, stored.keys() - used)
    model.generation_config = generation_config(path) or GenerationConfig.from_pretrained(
        path, config_file_name="config.json", _from_model_config=True
    )
    spans = {name: [stored[part].span for part in found[name].names] for name in parameters if not found[name].convert}
    return Weights(model, whole, spans, reader)


def _check_files(directory: Path, where: str) -> None:
    """Raise UserError for weights in the directory that would silently not be read."""
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{where}: there is an adapter (adapter_config.json). Merge it into the model, and train that.")
    if (index := directory / INDEX).exists():
        if (directory / SINGLE).exists():
            raise UserError(f"{where}: there is a {SINGLE} next to {INDEX}. Remove the one that is out of date.")
        if unread := {file.name for file in directory.glob("model-*.safetensors")} - set(read_index(index).values()):
            raise UserError(f"{where}: {min(unread)} is not listed in {INDEX}. Remove it, or correct the index.")


def _say_unused(where: str, config: PretrainedConfig, names: Iterable[str]) -> None:
    """Report tensors in the files that the model does not have. names: of these."""
    passed_on = {name for name in names if name.startswith(MTP) and linear_layers(config)}
    if passed_on:
        print(f"{where}: the {len(passed_on)} weights {MTP}* are not trained; checkpoints keep them as they are.", flush=True)
    if unused := sorted(name for name in names if not name.endswith(HARMLESS) and name not in passed_on):
        which = f"{len(unused)} weights in the files are not used, {unused[0]} first"
        print(f"warning: {where}: {which}; checkpoints lack them.", flush=True)


def _whole(where: str, model, found: dict[str, Source], stored: dict[str, Stored], reader: Reader, name: str) -> torch.Tensor:
    """Return the parameter or buffer in the precision of the files' tensors, or one that can hold them all. Raise UserError if
    it is not finite."""
    source = found[name]
    dtype = functools.reduce(torch.promote_types, (DTYPES[stored[part].span.dtype] for part in source.names))
    sizes = [stored[part].span.elements for part in source.names]
    out = torch.empty(sum(sizes), dtype=dtype)
    tensors = [own.view(stored[part].shape) for part, own in zip(source.names, out.split(sizes), strict=True)]
    for part, tensor in zip(source.names, tensors, strict=True):
        reader.read([stored[part].span], tensor.view(-1))
        if (wrong := int((~tensor.isfinite()).sum())) > 0:
            raise UserError(
                f"{where}: {wrong:,} of the {tensor.numel():,} values of {part} in {stored[part].span.file} are NaN or "
                f"infinite. {AGAIN}; if they came from a training, take an earlier checkpoint."
            )
    if source.convert:
        return source.whole(model, name, tensors)
    parent, _, leaf = name.rpartition(".")
    return out.view(getattr(model.get_submodule(parent), leaf).shape)


# --------------------------------------------------------------------------------------------------------- every rank


@torch.no_grad()
def fill(
    model: PreTrainedModel, weights: Weights | None, path: str, ranks: Ranks, say: bool = True, name: str = "--model"
) -> None:
    """Give every rank its part of the model's parameters, in fp32, and all buffers. weights: on the first rank. say: whether
    the first rank prints a line. name: of the flag, for a message. Raise UserError if a node has other files at `path` than the
    first one. A collective."""
    if say and ranks.is_main:
        print(f"loading {path}", flush=True)
    _fill_rest(model, weights, ranks)
    known = dist.from_main(weights.spans if weights else None)
    spans = {name: [FileSpan(*span) for span in of] for name, of in known.items()}
    files = _seen_by_all({span.file for of in spans.values() for span in of}, path, name)
    # A second reader would map the files again, whose pages count as often as they are mapped.
    with contextlib.closing((weights and weights.reader) or Reader(files or {})) as reader:
        for name, parameter in model.named_parameters():
            if name.endswith((".lora_A", ".lora_B", "value_head")):
                continue  # an adapter's, or a critic's
            own = local(parameter.data)
            block = Block.of(parameter)
            if files and name in spans and block.shape[1:] == parameter.shape[1:]:  # cut along the first dimension at most
                first = block.offset[0] * parameter.shape[1:].numel() if block.shape else 0
                reader.read(spans[name], own.view(-1), first)
                continue
            own.copy_(_from_first(weights, name, parameter.shape, ranks)[block.slices()])
            watchdog.progress()


def _from_first(weights: Weights | None, name: str, shape: torch.Size, ranks: Ranks) -> torch.Tensor:
    """Return the whole parameter in fp32, on the device."""
    whole = torch.empty(shape, device=ranks.device)
    if weights:
        whole.copy_(weights.whole(name))
    if ranks.world_size > 1:
        torch.distributed.broadcast(whole, src=0)
    return whole


def _fill_rest(model: PreTrainedModel, weights: Weights | None, ranks: Ranks) -> None:
    """Most buffers, such as rotary frequencies, are in no file and would be uninitialised memory."""
    if weights:
        model.generation_config = weights.model.generation_config
    # A tensor may have two names here and one there, after a forward pass with LongRoPE.
    known = dict(weights.model.named_buffers(remove_duplicate=False)) if weights else None
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        value = known[name].cpu() if known else torch.empty_like(buffer, device="cpu")
        if ranks.world_size > 1:
            torch.distributed.broadcast(value, src=0)
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, value.to(ranks.device))


def _seen_by_all(names: set[str], path: str, flag: str) -> dict[str, Path] | None:
    """Return the model's files of these names on this machine; None if a rank does not see all. Raise UserError if a node's
    files differ from those of the first one. A collective."""
    files = {name: find(path, name) for name in sorted(names)}
    samples = None
    if len(launch.nodes()) > 1 and launch.here().local_rank == 0 and all(files.values()):
        samples = {name: sample([file]) for name, file in files.items()}
    reports = dist.all_gather_values([platform.node(), all(files.values()), samples])
    first, _, expected = reports[0]
    for host, _, found in reports:
        if other := [name for name in found or () if found[name] != expected[name]]:
            raise UserError(
                f"{flag} {path}: {other[0]} on {host} is not the file that {first} has. Give all nodes the same model."
            )
    return files if all(seen for _, seen, _ in reports) else None
