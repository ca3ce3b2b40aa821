"""The model that training starts from: the --model flag's directory or hub name, its config and its tokenizer.

Models that would train wrongly or crash late are refused here, in a message that says what to do. `check_model` looks at config
and tokenizer before any weight is read; rl/model/loading.py reads the weights, and refuses files that hold only a part of them.
rl/model/policy.py compares the model's forward pass with ours.
"""

import functools
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging

from rl.errors import UserError
from rl.hub import find
from rl.model.attention import ATTENTION, check_supported, linear_layers
from rl.ranks import device

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # of images and text, model_type
GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# The learner and the embedded engine use these modules.
MODULES = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
DEMOS = ("demo", "demo-moe", "demo-hybrid", "demo-vl", "demo-calculator")  # made by examples/demo
MODULES_WITH_IMAGES = ("model.visual.blocks", "model.language_model.layers", "model.language_model.embed_tokens", "lm_head")
logging.disable_progress_bar()  # "Loading weights" once per model and rank would bury the run's own lines


def takes_images(config: PretrainedConfig) -> bool:
    """Whether the model takes images: by its family, transformers' classes, or, with code of its own, a tower's config."""
    kind = getattr(config, "model_type", None)
    if kind in FAMILIES or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return True
    return kind not in CONFIG_MAPPING and getattr(config, "vision_config", None) is not None


def has_experts(config: PretrainedConfig) -> bool:
    """Whether the model is a mixture of experts."""
    return bool(getattr(config.get_text_config(), "num_experts_per_tok", None))


def resolve(model: str) -> str:
    """The directory of "demo" or one of its variants, made on first use; a directory or a hub name stays as it is."""
    if model not in DEMOS:
        return model
    from examples.demo import directory, is_made  # late: few need it

    if is_made(directory(model)):
        return str(directory(model))
    from examples.demo.sums import model_dir

    return model_dir(model)


def load_config(path: str, trust_remote_code: bool = False, name: str = "--model") -> PretrainedConfig:
    """name: of the flag, for a message."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # no such place, not JSON, values that the model's own class refuses
        custom = "trust_remote_code" in str(error)
        remedy = "If you trust that code, add --trust-remote-code." if custom else "Give a directory or a hub name."
        raise UserError(f"{name} {path}: no model can be read there ({reason_of(error)}). {remedy}") from None


@functools.cache
def load_tokenizer(path: str, trust_remote_code: bool = False, name: str = "--model") -> PreTrainedTokenizerBase:
    remedy = "Save one next to the weights (tokenizer.save_pretrained)."
    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        # transformers would make an empty one of the model's class, silently
        raise UserError(f"{name} {path}: the directory has no tokenizer ({', '.join(TOKENIZER_FILES)}). {remedy}")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises nearly anything here: OSError, ValueError, TypeError, KeyError
        raise UserError(f"{name} {path}: no tokenizer can be read there ({reason_of(error)}). {remedy}") from None


# ------------------------------------------------------------------------------------- checks before the weights


def check_model(path: str, tokenizer: PreTrainedTokenizerBase, args, name: str = "--model") -> None:
    """Raise UserError for a model or tokenizer that cannot be trained with a script's flags. Reads no weights."""
    config = load_config(path, args.trust_remote_code, name)
    where = f"{name} {path}"
    model = _check_modules(config, where, args.trust_remote_code)
    text = config.get_text_config()
    if linear_layers(config):
        from rl.model.hybrid.delta_net import check_flags, check_layers

        check_layers(model, where)
        check_flags(text, args, getattr(args, "engine", None) if name == "--model" else None)
    check_lengths(text, args)
    check_supported(text, where, sum(args.longest))
    if args.learner.sequence_parallel > 1:
        from rl.model.sequence_parallel import check_heads

        check_heads(config, args.learner.sequence_parallel)
    _check_tokenizer(text, tokenizer, where)
    _check_end_tokens(end_token_ids(path, tokenizer, args.trust_remote_code, name), text, tokenizer, where)


def check_lengths(config: PretrainedConfig, args) -> None:
    """Raise UserError if prompt + response fit neither the model's context nor one micro-batch."""
    prompt, response = args.longest
    own, shared_by = args.learner.max_tokens_per_micro_batch, args.learner.sequence_parallel
    context = getattr(config, "max_position_embeddings", None)
    sizes = f"--max-prompt-length {prompt} + --max-response-length {response} = {prompt + response} tokens"
    if hasattr(args.data, "max_length"):
        sizes = f"--max-length {args.data.max_length} tokens"
    if context and prompt + response > context:
        raise UserError(f"{sizes}, but the model's context is {context}. Lower one of them.")
    if prompt + response > own * shared_by:
        limit = f"--max-tokens-per-micro-batch is {own}"
        if shared_by > 1:
            limit += f" and --sequence-parallel {shared_by}, {own * shared_by} tokens together"
        raise UserError(f"{sizes}, but {limit}: a sequence must fit in one micro-batch.")


def _check_modules(config: PretrainedConfig, where: str, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model without weights. Raise UserError if it lacks modules that training needs."""
    if takes_images(config) and config.model_type not in FAMILIES:
        raise UserError(
            f"{where}: it takes images, and is a {config.model_type}. Of such models {', '.join(FAMILIES)} can be trained."
        )
    try:
        model = empty_model(config, trust_remote_code)
    except Exception as error:  # an unknown class, no support for our attention, or anything from remote code
        raise UserError(f"{where}: transformers cannot make a causal language model of it ({reason_of(error)}).") from None
    names = {name for name, _ in model.named_modules()}
    needed = MODULES_WITH_IMAGES if takes_images(config) else MODULES
    if missing := [name for name in needed if name not in names]:
        raise UserError(
            f"{where}: {type(model).__name__} has no {' and no '.join(missing)}, which training needs. Take a decoder that is "
            "laid out like Llama (Llama, Qwen2, Qwen2.5, Qwen3, Mistral, OLMo-2, ...)."
        )
    return model


def empty_model(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model on the meta device: no weights and no memory."""
    with torch.device("meta"):
        return _from_config(config, trust_remote_code)


def unfilled_model(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model with its parameters on the meta device and its buffers, which few files hold, on the CPU."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one on the meta device may be tied: it stays
            parameter = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            parameter._is_hf_initialized = True  # or transformers would initialize it, in Python
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta
    try:
        return _from_config(config, trust_remote_code)
    finally:
        torch.nn.Module.register_parameter = register


def _from_config(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """A vision tower attends within each image, by "sdpa"."""
    attention = {"text_config": ATTENTION, "vision_config": "sdpa"} if takes_images(config) else ATTENTION
    options = {"trust_remote_code": trust_remote_code, "dtype": torch.float32, "attn_implementation": attention}
    if has_experts(config) and device.kind() in device.LOOPED_EXPERTS:
        from rl.model.grouped_experts import experts_implementation

        options["experts_implementation"] = experts_implementation()
    return auto_class(config).from_config(config, **options)


def layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers, including the vision tower's: each is sharded and recomputed by itself."""
    tower = model.model.visual.blocks if takes_images(model.config) else ()
    return [*tower, *decoder_layers(model)]


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [*(model.model.language_model if takes_images(model.config) else model.model).layers]


def auto_class(config: PretrainedConfig) -> type:
    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def _check_tokenizer(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise UserError for the tokenizer of another model: one with ids that have no embedding, or far too few tokens."""
    vocabulary = tokenizer.get_vocab()
    rows = config.vocab_size
    remedy = "It belongs to another model, or was saved incompletely: copy the model's own files next to the weights."
    if len(vocabulary) < rows / 2:
        raise UserError(f"{where}: the tokenizer has {len(vocabulary)} tokens, the model's vocabulary {rows}. {remedy}")
    # Some models keep special tokens of other modalities behind the embedding; they matter only if prompts have them.
    used = set(vocabulary.values()) - set(tokenizer.added_tokens_decoder) | set(_template_ids(tokenizer))
    used |= {token for token in (tokenizer.eos_token_id, tokenizer.bos_token_id) if token is not None}
    if beyond := sorted(token for token in used if token >= rows):
        text = tokenizer.convert_ids_to_tokens(beyond[0])
        raise UserError(
            f"{where}: {len(beyond)} of the tokenizer's ids have no embedding, {beyond[0]} ({text!r}) first: the model's "
            f"vocabulary ends at {rows - 1}. {remedy} If you added tokens, resize the embedding (resize_token_embeddings)."
        )


def _template_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the chat template puts around a message; none without a template, or if it refuses a plain message."""
    try:
        message = [{"role": "user", "content": "1"}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    except Exception:  # a template may raise anything; a prompt that it refuses is reported with its row
        return []


def end_token_ids(
    path: str, tokenizer: PreTrainedTokenizerBase | None = None, trust_remote_code: bool = False, name: str = "--model"
) -> set[int]:
    """All end tokens that generation_config.json, config.json or the tokenizer name. Any of them ends a response."""
    sources = {"config.json": load_config(path, trust_remote_code, name), GENERATION: generation_config(path, name)}
    found = set()
    for file, source in (sources | {"the tokenizer": tokenizer}).items():
        ids = getattr(source, "eos_token_id", None)
        ids = ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
        if wrong := [token for token in ids if type(token) is not int]:
            raise UserError(f"{name} {path}: eos_token_id of {file} is {wrong[0]!r:.60}, no token's number. Correct it.")
        found.update(ids)
    return found


def generation_config(path: str, name: str = "--model") -> GenerationConfig | None:
    """The model's generation_config.json; None if it has none, as many models. Raise UserError if it cannot be read."""
    if not (file := find(path, GENERATION)):
        return None
    try:
        return GenerationConfig.from_pretrained(path)
    except Exception as error:  # OSError if it is no JSON; TypeError, AttributeError, ValueError for other values
        raise UserError(f"{name} {path}: {file.name} cannot be read ({reason_of(error)}). Correct it, or remove it.") from None


def _check_end_tokens(ids: set[int], config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise UserError if no response could ever end before its limit."""
    known = {token for token in ids if token < config.vocab_size and tokenizer.convert_ids_to_tokens(token) is not None}
    if not known:
        named = f"the end token {sorted(ids)} is not in the vocabulary" if ids else "no eos_token_id is named"
        raise UserError(
            f"{where}: {named} in generation_config.json, config.json or the tokenizer, so that no response would end before "
            "its limit. Name the right one in generation_config.json."
        )


def reason_of(error: BaseException) -> str:
    """The error's message on one line of at most 300 characters, without transformers' list of all its classes."""
    text = str(error).partition("Model type should be one of")[0].strip()
    return " ".join((text or type(error).__name__).split())[:300]


def check_second_model(path: str, args, policy: str, flag: str, whose: str) -> PreTrainedTokenizerBase:
    """As `check_model`, of the model that `flag` names; return its tokenizer, which must equal that of the model at `policy`:
    their tokens are compared, because models of one family may have embeddings of different lengths (Qwen2.5's differ from 7B
    on). whose: the subject of the message, such as "A teacher"."""
    load_config(path, args.trust_remote_code, flag)  # first: without a model, a missing tokenizer is not the problem
    tokenizer = load_tokenizer(path, args.trust_remote_code, flag)
    ours = load_tokenizer(policy, args.trust_remote_code).get_vocab()
    its = tokenizer.get_vocab()
    if differing := sorted(token for token in ours.keys() | its.keys() if ours.get(token) != its.get(token)):
        token = differing[0]
        ids = " and ".join("missing" if vocabulary.get(token) is None else f"{vocabulary[token]}" for vocabulary in (ours, its))
        raise UserError(
            f"{flag} {path}: its tokenizer is not that of --model {policy}: {len(differing):,} tokens differ, such as "
            f"{token!r} ({ids}). {whose} reads the policy's tokens: take a model of the same family."
        )
    check_model(path, tokenizer, args, flag)
    return tokenizer
