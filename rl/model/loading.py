"""Each learner's part of the weights, read from the files: no rank, the first included, ever holds the model.

The first rank finds out which spans of which files make up each parameter. Each rank then reads the spans of its part, in the
files' precision, and casts them as they arrive. Parameters that cannot be read in parts are read by the first rank, which sends
them to all, one at a time: all parameters if a learner does not see the files, or those that files hold in another form than a
model in memory, such as transposed. For the forward check at the start, the first rank holds one layer at a time.

Left out: weights that are in no safetensors files, are quantized, or are cut otherwise than into parameters. transformers reads
these, whole and in fp32, on the first rank.
"""

import contextlib
import functools
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from rl.errors import UserError
from rl.hub.names import Source, sources
from rl.hub.tensor_reader import DTYPES, INDEX, SINGLE, FileSpan, Reader, Stored, find, read_index, sample, stored_tensors
from rl.model.attention import linear_layers
from rl.model.pretrained import (
    auto_class,
    computed,
    empty_model,
    generation_config,
    layers,
    load_config,
    reason_of,
    unfilled_model,
)
from rl.model.shards import Block, local
from rl.ranks import dist, launch, watchdog
from rl.ranks.dist import Ranks

MTP = "mtp."  # weights that predict further tokens, which transformers' hybrid models do not have
HARMLESS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")  # buffers that old files hold and models compute


# ----------------------------------------------------------------------------------------------------- weights


def load_weights(
    path: str, dtype: torch.dtype, trust_remote_code: bool = False, say: bool = True, name: str = "--model"
) -> PreTrainedModel:
    """The model with its weights, on the CPU. Raises UserError unless the files have all of them, in their shapes, and finite.
    name: of the flag, for a message."""
    where = f"{name} {path}"
    check_files(path, where)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # no table of missing weights next to our message
    try:
        if say:
            print(f"loading {path}", flush=True)
        config = load_config(path, trust_remote_code)
        model, info = auto_class(config).from_pretrained(
            path,
            dtype=dtype,
            **computed(config),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `info` has them, and they are refused below
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # safetensors', pickle's and transformers' own, and OSError where there are no weights
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise UserError(f"{where}: the weights cannot be read ({reason}). Copy or download the files again.") from error
    finally:
        logging.set_verbosity(level)
    _check_loading(info, where)
    if say:
        say_unused(where, config, info["unexpected_keys"])
    # If an lm_head in the files differs from the embedding, transformers unties them, but only on this rank.
    tied = empty_model(model.config, trust_remote_code)
    if extra := {name for name, _ in model.named_parameters()} - {name for name, _ in tied.named_parameters()}:
        raise UserError(not_tied(where, min(extra)))
    for name, parameter in model.named_parameters():
        _check_finite(where, name, parameter.detach())
    return model


def check_files(path: str, where: str) -> None:
    """Raises UserError for weights in the directory that would silently not be read."""
    directory = Path(path)
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{where}: there is an adapter (adapter_config.json). Merge it into the model, and train that.")
    index = directory / INDEX
    if not index.exists():
        return
    if (directory / SINGLE).exists():
        raise UserError(f"{where}: there is a {SINGLE} next to {INDEX}. Remove the one that is out of date.")
    if unread := {file.name for file in directory.glob("model-*.safetensors")} - set(read_index(index).values()):
        raise UserError(f"{where}: {min(unread)} is not listed in {INDEX}. Remove it, or correct the index.")


def not_tied(where: str, name: str) -> str:
    return (
        f"{where}: config.json ties {name} to the embedding (tie_word_embeddings), but the files hold another one. "
        "Set tie_word_embeddings to false, or remove that weight."
    )


def say_unused(where: str, config: PretrainedConfig, names: Iterable[str]) -> None:
    """Reports tensors in the files that the model does not have. names: of these."""
    unused = sorted(name for name in names if not name.endswith(HARMLESS))
    passed_on = [name for name in unused if name.startswith(MTP) and linear_layers(config)]
    if passed_on:
        print(
            f"{where}: the {len(passed_on)} weights {MTP}* are not trained; checkpoints keep them as they are.",
            flush=True,
        )
    if unused := [name for name in unused if name not in passed_on]:
        which = f"{len(unused)} weights in the files are not used, {unused[0]} first"
        print(f"warning: {where}: {which}; checkpoints lack them.", flush=True)


def _check_loading(info: dict, where: str) -> None:
    """info: transformers' report. Raises UserError for weights that were not in the files."""
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        shapes = f"{name} is {list(stored)} in the files, {list(wanted)} by config.json"
        raise UserError(
            f"{where}: {len(mismatched)} weights have another shape: {shapes}. Take config.json from the same model."
        )
    if errors := [*info.get("error_msgs", ()), *info.get("conversion_errors", ())]:
        raise UserError(f"{where}: the weights cannot be read ({errors[0]}).")
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"{where}: {len(missing)} of the model's weights are not in its files, {missing[0]} first; they would be random. "
            "Copy or download the files again, or take config.json from the same model."
        )


@dataclass
class Weights:
    """A model's weights on the first rank, before anything is sharded."""

    model: PreTrainedModel  # on the CPU; its parameters may be on the meta device
    whole: Callable[[str], torch.Tensor]  # name -> parameter or buffer, on the CPU, in the files' precision
    dtypes: dict[str, torch.dtype]  # of the files, by parameter
    # by parameter: its elements, end to end, if they lie so in files
    spans: dict[str, list[FileSpan]] = field(default_factory=dict)

    @contextlib.contextmanager
    def by_layer(self) -> Iterator[None]:
        """Gives the model its weights in fp32: a layer's while the layer computes, those outside of layers all the time."""
        places = defaultdict(list)  # for each parameter on the meta device: the modules that have it
        names = {parameter: name for name, parameter in self.model.named_parameters() if parameter.is_meta}
        for module in self.model.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter in names:
                    places[parameter].append((module, leaf))

        def put(parameters: Iterable[nn.Parameter], filled: bool, *_) -> None:
            for parameter in parameters:
                whole = nn.Parameter(self.whole(names[parameter]).float(), requires_grad=False) if filled else parameter
                for module, leaf in places[parameter]:
                    setattr(module, leaf, whole)

        hooks = []
        of_layers = set()
        for layer in layers(self.model):
            own = [parameter for parameter in layer.parameters() if parameter in names]
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


def open_weights(path: str, trust_remote_code: bool = False, say: bool = True, name: str = "--model") -> Weights:
    """The weights at `path`, a directory or a hub name. Raises UserError unless all of them are there and can be read. say:
    whether to report unused weights. name: of the flag, for a message."""
    where = f"{name} {path}"
    check_files(path, where)
    config = load_config(path, trust_remote_code)
    stored = None if getattr(config, "quantization_config", None) else stored_tensors(path, name)
    weights = _stored_weights(path, where, unfilled_model(config, trust_remote_code), stored, say) if stored else None
    if weights is None:
        model = load_weights(path, torch.float32, trust_remote_code, say, name)
        held = model.state_dict()
        weights = Weights(model, held.pop, {name: held[name].dtype for name, _ in model.named_parameters()})
    return weights


def _stored_weights(path: str, where: str, model: PreTrainedModel, stored: dict[str, Stored], say: bool) -> Weights | None:
    """None if the files lack tensors, or hold them in a form that is not read here. Raises UserError for weights that are no
    floats."""
    found = sources(model, {name: of.shape for name, of in stored.items()})
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    needed = parameters.keys() | (model.state_dict().keys() & buffers.keys())
    if found is None or not needed <= found.keys():
        return None
    used = {name for source in found.values() for name in source.names}
    no_floats = {name for name in used if not DTYPES.get(stored[name].span.dtype, torch.uint8).is_floating_point}
    if wrong := no_floats & {part for name in parameters for part in found[name].names}:
        span = stored[min(wrong)].span
        raise UserError(
            f"{where}: {min(wrong)} in {span.file} is {span.dtype}, no float of 16, 32 or 64 bits, and config.json has no "
            "quantization_config that says how to read it. Take the model's own weights in bfloat16."
        )
    if no_floats:  # a buffer's
        return None
    files = {name: find(path, name) for name in {stored[name].span.file for name in used}}
    whole = functools.partial(_whole, where, model, found, stored, Reader(files))
    for name in found.keys() - needed:  # the same parameter as another
        first = next(n for n, p in model.named_parameters() if p is model.get_parameter(name))
        if not torch.equal(whole(name).float(), whole(first).float()):
            raise UserError(not_tied(where, name))
    with torch.no_grad():
        for name in needed & buffers.keys():
            buffers[name].copy_(whole(name))
    if say:
        say_unused(where, model.config, stored.keys() - used)
    model.generation_config = generation_config(path) or _from_config(path)
    spans = {name: [stored[part].span for part in found[name].names] for name in parameters if not found[name].convert}
    dtypes = {name: _dtype(found[name], stored) for name in parameters}
    return Weights(model, whole, dtypes, spans)


def _from_config(path: str) -> GenerationConfig:
    """As from_pretrained makes it for a model that has none."""
    return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)


def _dtype(source: Source, stored: dict[str, Stored]) -> torch.dtype:
    """The precision of the files' tensors, or one that can hold them all."""
    dtypes = {DTYPES[stored[name].span.dtype] for name in source.names}
    return functools.reduce(torch.promote_types, dtypes)


def _whole(where: str, model, found: dict[str, Source], stored: dict[str, Stored], reader: Reader, name: str) -> torch.Tensor:
    """The parameter or buffer. Raises UserError if it is not finite."""
    source = found[name]
    dtype = _dtype(source, stored)
    wanted = model.state_dict()[name].shape
    if not source.convert:
        out = torch.empty(wanted, dtype=dtype)
        reader.read([stored[part].span for part in source.names], out.view(-1))
        parts = out.view(-1).split([stored[part].span.elements for part in source.names])
        for part, tensor in zip(source.names, parts, strict=True):
            _check_finite(where, f"{part} in {stored[part].span.file}", tensor)
        return out
    tensors = [torch.empty(stored[part].shape, dtype=dtype) for part in source.names]
    for part, tensor in zip(source.names, tensors, strict=True):
        reader.read([stored[part].span], tensor.view(-1))
        _check_finite(where, f"{part} in {stored[part].span.file}", tensor)
    return source.whole(model, name, tensors)


def _check_finite(where: str, what: str, tensor: torch.Tensor) -> None:
    finite = tensor.isfinite()
    if not finite.all():
        raise UserError(
            f"{where}: {int((~finite).sum()):,} of the {finite.numel():,} values of {what} are NaN or infinite. Copy or "
            "download the files again; if they came from a training, take an earlier checkpoint."
        )


# --------------------------------------------------------------------------------------------------------- every rank


@torch.no_grad()
def fill(
    model: PreTrainedModel, weights: Weights | None, path: str, ranks: Ranks, say: bool = True, name: str = "--model"
) -> None:
    """Gives every rank its part of the model's parameters, in fp32, and all buffers. weights: on the first rank, and used up by
    this. say: whether the first rank prints a line. name: of the flag, for a message. Raises UserError if a node has
    other files at `path` than the first one. A collective."""
    if say and ranks.is_main:
        print(f"loading {path}", flush=True)
    _fill_rest(model, weights, ranks)
    known = {}
    if weights:
        weights.model = None  # its parameters, if it holds any, go one by one
        known["spans"] = weights.spans
        known["dtypes"] = {name: str(dtype).removeprefix("torch.") for name, dtype in weights.dtypes.items()}
    known = dist.from_main(known)
    spans = {name: [FileSpan(*span) for span in of] for name, of in known["spans"].items()}
    files = _seen_by_all({span.file for of in spans.values() for span in of}, path, name)
    with contextlib.closing(Reader(files or {})) as reader:
        for name, parameter in model.named_parameters():
            if name not in known["dtypes"]:
                continue  # an adapter's
            own = local(parameter.data)
            block = Block.of(parameter)
            if files and name in spans and block.shape[1:] == parameter.shape[1:]:  # cut along the first dimension at most
                first = block.offset[0] * parameter.shape[1:].numel() if block.shape else 0
                reader.read(spans[name], own.view(-1), first)
            else:
                whole = _from_first(weights, name, getattr(torch, known["dtypes"][name]), parameter.shape, ranks)
                own.copy_(whole[block.slices()])
                watchdog.progress()


def _fill_rest(model: PreTrainedModel, weights: Weights | None, ranks: Ranks) -> None:
    """Gives every rank all buffers. Most, such as rotary frequencies, are in no file and would be uninitialised memory."""
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


def _from_first(weights: Weights | None, name: str, dtype: torch.dtype, shape: torch.Size, ranks: Ranks) -> torch.Tensor:
    if weights:
        whole = weights.whole(name).to(ranks.device, dtype)
    else:
        whole = torch.empty(shape, dtype=dtype, device=ranks.device)
    if ranks.world_size > 1:
        torch.distributed.broadcast(whole, src=0)
    return whole


def _seen_by_all(names: set[str], path: str, flag: str) -> dict[str, Path] | None:
    """The model's files of these names on this machine; None if a rank does not see all. Raises UserError if a node's files
    differ from those of the first one. A collective."""
    if not names:
        return None
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
