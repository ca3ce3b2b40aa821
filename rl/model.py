"""From the --model flag to a directory, a config and a tokenizer, with errors a user can act on."""

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from rl.attention import check_supported
from rl.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
logging.disable_progress_bar()  # "Loading weights" once per model and rank would bury the run's own lines


def resolve(model: str) -> str:
    """ "demo" -> the demo model's directory, made on first use; a directory or a hub name stays what it is."""
    if model == "demo":
        from rl import demo

        return demo.model_dir()
    return model


def load_config(path: str, trust_remote_code: bool = False) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--model {path}: no model can be read there ({reason}). Give a directory or a hub name.") from None
    check_supported(config, f"--model {path}")
    return config


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    remedy = "Save one beside the weights (tokenizer.save_pretrained)."
    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        # transformers would make an empty one of the model's class, in silence
        raise UserError(f"--model {path}: the directory has no tokenizer ({', '.join(TOKENIZER_FILES)}). {remedy}")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises nearly anything here: OSError, ValueError, TypeError, KeyError
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--model {path}: no tokenizer can be read there ({reason}). {remedy}") from None


def check_lengths(config: PretrainedConfig, max_prompt_length: int, max_response_length: int, max_token_len: int) -> None:
    """Raises UserError if prompt + response fit neither the model's context nor one micro-batch."""
    longest = max_prompt_length + max_response_length
    context = getattr(config, "max_position_embeddings", None)
    sizes = f"--max-prompt-length {max_prompt_length} + --max-response-length {max_response_length} = {longest} tokens"
    if context and longest > context:
        raise UserError(f"{sizes}, but the model's context is {context}. Lower one of them.")
    if longest > max_token_len:
        raise UserError(f"{sizes}, but --ppo-max-token-len-per-gpu is {max_token_len}: a sequence must fit in one micro-batch.")
