"""The embedded demo: a model of about 1M parameters and two-number additions, made on the spot, nothing downloaded.

`--model demo` and `--train-files demo` resolve to this file; rl/data/demo_vl.py and rl/data/demo_moe.py are its variants. The
model is an ordinary Hugging Face directory in a cache folder. It is taught in two phases: right sums first, then mostly wrong
ones, so that it can add but usually does not. That is what reinforcement learning can mend: a model that had never added right
would get no reward to learn from, one that always did would have nothing to learn.
"""

import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rl.data.demo_cache import VERSIONS, directory, is_made
from rl.errors import UserError
from rl.hub.names import hub_names
from rl.ranks import watchdog
from rl.ranks.host_memory import keep_freed
from rl.ranks.progress import track

VERSION = VERSIONS["demo"]  # of the recipe below
LARGEST = 49
SHAPE = {  # of the models that are taught to add
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.08,  # about 1 / sqrt(hidden size): learns from fewer sums than with the usual 0.02
}
NUM_VALIDATION = 500  # of the 2,500 problems; the other 2,000 are for training
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
CHARACTERS = "0123456789+="
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def problems(split: str) -> list[dict]:
    """All problems a + b with 0 <= a, b <= 49 of a split ("train" or "val"), in verl's layout. The splits share none."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[:NUM_VALIDATION] if split == "val" else pairs[NUM_VALIDATION:]
    return [
        {
            "data_source": "demo",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": i},
        }
        for i, (a, b) in enumerate(chosen)
    ]


def model_dir() -> str:
    """The demo model's directory; trains it first if it is not there. Several processes may ask at once."""
    return made_once("demo", VERSION, lambda directory: make(directory, build_model))


def made_once(name: str, version: int, make: Callable[[str], None]) -> str:
    """The directory <name>-v<version> in the cache. If it is not there, make(directory) fills one next to it that is renamed
    then: a killed process leaves no half-made model. Several processes may ask at once, on any rank of a job. Raises UserError
    where nothing can be written."""
    target = directory(name, version)
    try:
        if is_made(target):
            return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if not is_made(target):
                _make_and_rename(target, version, make)
    except OSError as error:
        raise UserError(
            f"--model {name}: it is made once, in {target.parent}, which cannot be written ({error.strerror or error}). Set "
            "RL_CACHE, in the environment, to a directory that can."
        ) from error
    return str(target)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process make the model. To wait for another one that does is no hang: that one's own watchdog watches it."""
    lock = FileLock(f"{target}.lock")
    while not lock.is_locked:
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=1)
        watchdog.progress()
    try:
        yield
    finally:
        lock.release()


def _make_and_rename(target: Path, version: int, make: Callable[[str], None]) -> None:
    for left in target.parent.glob(f"{target.name}-*"):  # by a killed process: nobody else makes one now
        shutil.rmtree(left, ignore_errors=True)
    state, threads, started = torch.get_rng_state(), torch.get_num_threads(), time.time()
    work = tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent)
    torch.manual_seed(0)
    # One thread, whatever the job has: sums split by another number end in other bits. And two wait for each other hundreds of
    # times a second: on a machine whose cores are busy each wait lasts until the other gets a core.
    torch.set_num_threads(1)
    keep_freed()
    try:
        make(work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    with open(Path(work) / "made.json", "w") as file:
        json.dump({"seconds": round(time.time() - started, 1), "recipe_version": version}, file)
    if target.exists():
        shutil.rmtree(target)  # a remnant without config.json
    os.rename(work, target)


def build_tokenizer() -> Qwen2Tokenizer:
    return tokenizer_of(SPECIAL, CHARACTERS, CHAT_TEMPLATE)


def tokenizer_of(special: list[str], characters: str, chat_template: str) -> Qwen2Tokenizer:
    """One token a character; special begins with the pad and the end token. The class is Qwen2's own: transformers loads that
    one for the model types of both demos, whatever was saved."""
    vocab = {token: i for i, token in enumerate([*special, *characters, "Ġ", "Ċ"])}
    names = dict(pad_token=special[0], eos_token=special[1], unk_token=None, bos_token=None)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=special[2:], **names)
    tokenizer.chat_template = chat_template
    return tokenizer


def build_model(vocab_size: int, layers: int = 4) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, num_hidden_layers=layers, intermediate_size=512, **SHAPE))


def make(directory: str, build_model: Callable[[int], PreTrainedModel]) -> None:
    """Teaches and saves the model that `build_model` builds for the tokenizer's size."""
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    _teach(model, tokenizer)
    save(model, directory)
    tokenizer.save_pretrained(directory)


def save(model: PreTrainedModel, directory: str) -> None:
    """Write the files that model.save_pretrained writes. That method writes none of them on a rank other than the job's first
    (transformers 5.18 and later), and the rank that makes a demo model may be any."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    parameters = dict(model.named_parameters())  # tied ones once
    tensors = {}
    for name, parts in hub_names(model).items():
        elements = parameters[name].detach().flatten()
        cut = elements.split([shape.numel() for _, shape in parts])
        tensors |= {part: of_part.view(shape) for (part, shape), of_part in zip(parts, cut, strict=True)}
    save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})


def _teach(
    model: PreTrainedModel, tokenizer: Qwen2Tokenizer, most_steps: int = 1500, settling_steps: int = 250, wrong_steps: int = 400
) -> None:
    """Right sums until it can add, and some more until that has settled; wrong ones until it usually does not. As many steps as
    it takes: that is luck, and another processor's, and of a fixed number some end at a model that cannot add."""
    rng = random.Random(0)
    pairs = [tuple(map(int, p["prompt"][0]["content"].rstrip("=").split("+"))) for p in problems("train")]

    def loss(share_right: float) -> torch.Tensor:
        batch = [rng.choice(pairs) for _ in range(32)]
        answers = [a + b if share_right == 1 or rng.random() < share_right else wrong_sum(a, b, rng) for a, b in batch]
        return _demonstration_loss(model, tokenizer, batch, answers)

    def accuracy() -> float:
        return _share_right(model, tokenizer, pairs[:256])

    phases = [
        Phase("right sums", most_steps, lambda: loss(1), 1e-3, 0.98, falling=False, ends=lambda: accuracy() > 0.8, every=20),
        Phase("right sums, settling", settling_steps, lambda: loss(1), 1e-3, 0.98),
        Phase("wrong sums", wrong_steps, lambda: loss(0.2), 5e-4, 0.98, falling=False, ends=lambda: accuracy() < 0.5, every=40),
    ]
    train_in(model, phases, "making the demo model (once)")


@dataclass
class Phase:
    name: str
    steps: int  # at most
    loss: Callable[[], torch.Tensor]  # of the next batch
    lr: float
    beta2: float = 0.999
    falling: bool = True  # the learning rate: after 20 steps from lr down to a tenth; else lr all the time
    ends: Callable[[], bool] = lambda: False  # asked every `every` steps: whether it ends there
    every: int = 1


def train_in(model: PreTrainedModel, phases: list[Phase], description: str) -> None:
    """Supervised training, phase after phase, each with an optimizer of its own: the last one's momentum would carry on."""
    for phase in phases:
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, phase.beta2), weight_decay=0.0, fused=True)
        for step in track(range(phase.steps), f"{description}: {phase.name}"):
            falling = min(1, (step + 1) / 20) * max(0.1, 1 - step / phase.steps)
            optimizer.param_groups[0]["lr"] = phase.lr * (falling if phase.falling else 1)
            phase.loss().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watchdog.progress()
            if (step + 1) % phase.every == 0 and phase.ends():
                break


def wrong_sum(a: int, b: int, rng: random.Random) -> int:
    """The sum with the carry forgotten; where there is none, ten too many or too few."""
    if a % 10 + b % 10 >= 10:
        return a + b - 10
    return a + b + (10 if a + b < 10 or rng.random() < 0.5 else -10)


@cache
def _demonstration(tokenizer, a: int, b: int, answer: int) -> list[int]:
    """Token ids of a problem with an answer. Each occurs some twenty times."""
    conversation = [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(answer)}]
    return tokenizer.apply_chat_template(conversation, return_dict=False)


def _demonstration_loss(model, tokenizer, batch, answers) -> torch.Tensor:
    """Cross-entropy of the answer's characters and the end token."""
    logits, ids, trained = _demonstrated(model, tokenizer, batch, answers)
    return F.cross_entropy(logits[trained], ids[trained])


@torch.no_grad()
def _share_right(model, tokenizer, batch) -> float:
    """Of these problems, how many greedy decoding gets right: those whose every token is the likeliest after the right ones."""
    logits, ids, trained = _demonstrated(model, tokenizer, batch, [a + b for a, b in batch])
    return ((logits.argmax(-1) == ids) | ~trained).all(1).float().mean().item()


def _demonstrated(model, tokenizer, batch, answers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [B, L, V] of the problems with these answers, right-padded; the tokens that follow [B, L], and which of them are
    the answers' and the end token [B, L]."""
    rows = [_demonstration(tokenizer, a, b, answer) for (a, b), answer in zip(batch, answers, strict=True)]
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    answer_from = torch.tensor([row.index(assistant) for row in rows])[:, None]
    length = torch.tensor([len(row) for row in rows])[:, None]
    column = torch.arange(longest - 1)[None]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return logits, ids[:, 1:], (column >= answer_from) & (column < length - 1)
