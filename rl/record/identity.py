"""The identity of a run, by which it resumes as the same run: its script, its flags, and the content of what the flags name.

A flag belongs to the run unless its type says that it may change. A different value is refused, or listed if --resume-mode
names the checkpoint. The flags of MUST_STAY are refused in any case: the saved state has no meaning under another value.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import xxhash

from rl import parts
from rl.data.prompts import PromptDataset
from rl.errors import UserError
from rl.hub.tensor_reader import sample
from rl.masking import masked
from rl.model.pretrained import resolve
from rl.ranges import DEFAULT_BATCH, Content, flag, marks, may_change
from rl.user_file import digest_code, digest_file

# The order of the prompts, the tensors of the optimizer's state, the count of versions and the width of the sampling masks'
# records depend on these.
MUST_STAY = {"seed", "shuffle", "optim", "freeze_vision_tower", "lora_rank", "lora_alpha", "lora_target"}
MUST_STAY |= {"top_k", "keep_sampling_mask"}
MUST_STAY_IN_A_STREAM = {"ppo_mini_batch_size", "train_batch_size", "publish_every"}


class Identity:
    """A run's identity now, to be compared with the one in a checkpoint."""

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
                contents[name] = _digest_model(resolve(value)) if content.kind == "model" else digest_code(value)
        return masked(json.loads(json.dumps({"script": self.script, "flags": parts.flat(self.args), "contents": contents})))

    def check(self, was: dict, where: Path) -> list[str]:
        """Return the differences from a saved record, a line each. Raise UserError for any unless --resume-mode names
        the checkpoint."""
        if self.script != was["script"]:
            raise UserError(f"{where} was written by {was['script']}, not by {self.script}. Resume with {was['script']}.")
        now, old = self._settled(self.record["flags"]), self._settled(was["flags"])
        changed = {name for name in now if now[name] != old.get(name)} - may_change(type(self.args))
        kept = MUST_STAY | (MUST_STAY_IN_A_STREAM if "staleness_threshold" in now else set())
        lines = [f"{flag(name)}: was {old.get(name)}, is {now[name]}" for name in now if name in changed]
        for name in [name for name in now if name in changed & kept]:
            raise UserError(
                f"{where} was written with {flag(name)} {old.get(name)}, now it is {now[name]}; its state means nothing under "
                "another value. Give the old one, or start a new run with another --experiment-name."
            )
        if any(flags.get("teacher_prompt") is not None for flags in (now, old)):  # train_sft.py has no such flag
            check_number(was["contents"], self.prompts, where)
        lines += self._other_contents(was)
        if lines and self.args.checkpoint.resume_mode in ("auto", "disable"):
            raise UserError(
                f"{where} is of a run with other settings. Give the old ones, start a new run with another "
                f"--experiment-name, or resume with the new ones with --resume-mode {where}:\n  " + "\n  ".join(lines)
            )
        return lines

    def _settled(self, flags: dict) -> dict:
        """Return the flags under today's names, with defaults for those that are newer, and the batch sizes as numbers."""
        defaults = json.loads(json.dumps(parts.flat(type(self.args)())))
        flags = masked(defaults | flags)
        update = flags.get("ppo_mini_batch_size")
        step = flags.get("train_batch_size") or update or DEFAULT_BATCH
        return flags | {"train_batch_size": step, "ppo_mini_batch_size": update or step}

    def _other_contents(self, was: dict) -> Iterable[str]:
        for name, old in masked(was["contents"]).items():
            if (new := self.record["contents"].get(name)) not in (None, old):
                named = [str(of.get(name, "the model's")) for of in (masked(was["flags"]), self.record["flags"])]
                what = "the tokenizer" if name == "tokenizer" else f"the content of {flag(name)}"
                yield f"{what}: was {named[0]} ({old}), is {named[1]} ({new})"


def check_number(contents: dict, prompts: PromptDataset, where: Path) -> None:
    """Raise UserError unless the run of the samples at `where` had as many prompts. contents: of its record."""
    number = int(contents["train_files"].split()[0])
    if len(prompts) != number:
        raise UserError(
            f"{where} is of a run with {number:,} training prompts, and now there are {len(prompts):,}, so its samples would "
            "belong to other rows. Give the same data and limits. --filter-overlong-prompts also leaves out rows whose "
            "--teacher-prompt is too long: raise --max-prompt-length."
        )


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
            state.update(digest_file(Path(file)).encode())
        else:
            spread = range(0, len(table), max(1, len(table) // 1000))
            state.update(json.dumps([len(table), *(table[i] for i in spread)], default=str).encode())
    weights = [f"weights {', '.join(map(str, prompts.weights))}"] if prompts.weights else []
    return ", ".join([f"{len(prompts)} prompts", state.hexdigest(), *weights])


def _digest_tokenizer(tokenizer) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items())
    return xxhash.xxh3_64_hexdigest(json.dumps([vocabulary, tokenizer.chat_template]).encode())
