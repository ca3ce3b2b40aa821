"""The identity of a run, by which it resumes as the same run: its script, its flags, and the content of what the flags name.

rl/checkpoint/resume.py compares it with the one in a checkpoint.
"""

import json
from functools import cached_property
from pathlib import Path

import xxhash

from rl import parts
from rl.data.prompts import PromptDataset
from rl.hub.tensor_reader import sample
from rl.masking import masked
from rl.model.pretrained import resolve
from rl.ranges import Content, marks


class Identity:
    """A run's identity now."""

    def __init__(self, args, script: str, path: str, prompts: PromptDataset):
        """args: the script's. path: the model's directory or hub name. prompts: to train."""
        self.args, self.script, self.path, self.prompts = args, script, path, prompts

    @cached_property
    def record(self) -> dict:
        """Script, flags, and a digest of each content, as JSON holds them, without secrets."""
        contents = {"model": _digest_model(self.path), "train_files": _digest_prompts(self.prompts)}
        contents["tokenizer"] = _digest_tokenizer(self.prompts.tokenizer)
        for name, content in marks(type(self.args), Content).items():
            if value := parts.get(self.args, name):
                from user_code.files import digest_code  # late: few runs have code of their own

                contents[name] = _digest_model(resolve(value)) if content.kind == "model" else digest_code(value)
        return masked(json.loads(json.dumps({"script": self.script, "flags": parts.flat(self.args), "contents": contents})))


def _digest_model(path: str) -> str:
    """Return a digest of the weights in a directory: names, sizes, and SAMPLES pieces of each file. Training changes all."""
    files = sorted(file for kind in ("*.safetensors", "*.bin") for file in Path(path).glob(kind)) if Path(path).is_dir() else []
    return sample(files) if files else path  # a hub name


def _digest_prompts(prompts: PromptDataset) -> str:
    """Return the number of prompts, with a digest of the files' bytes; for a data set that is no file, of 1,000 rows. Also the
    files' weights, if they have any: the order depends on them."""
    state = xxhash.xxh3_64()
    for file, table in zip(prompts.files, prompts.tables, strict=True):
        if Path(file).is_file():
            from user_code.files import digest_file

            state.update(digest_file(Path(file)).encode())
        else:
            spread = range(0, len(table), max(1, len(table) // 1000))
            state.update(json.dumps([len(table), *(table[i] for i in spread)], default=str).encode())
    weights = [f"weights {', '.join(map(str, prompts.weights))}"] if prompts.weights else []
    return ", ".join([f"{len(prompts)} prompts", state.hexdigest(), *weights])


def _digest_tokenizer(tokenizer) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items())
    return xxhash.xxh3_64_hexdigest(json.dumps([vocabulary, tokenizer.chat_template]).encode())
