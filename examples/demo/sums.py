"""The embedded demo: a model of about 1M parameters and two-number additions, made on the spot, nothing downloaded.

`--model demo`, `demo-moe` and `demo-hybrid` are taught here; pictures.py and calculator.py have recipes of their own. Each
model is an ordinary Hugging Face directory in a cache folder. It is taught in two phases: right sums first, then mostly wrong
ones, so that it can add but usually does not. That is what reinforcement learning can correct: a model that
had never added right would get no reward to learn from, and one that always did would have nothing to learn.
"""

import contextlib
import importlib
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
from rich.progress import track
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from examples.demo import VERSIONS, directory, is_made
from examples.demo.problems import problems
from rl.errors import UserError
from rl.hub import on_hub
from rl.ranks import watchdog
from rl.ranks.device import keep_freed

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
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
CHARACTERS = "0123456789+="
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def model_dir(name: str = "demo") -> str:
    """Return the directory of a demo model. Make the model first if it is not there."""
    return made_once(name, lambda directory: _make(name, directory))


def _make(name: str, directory: str) -> None:
    if name in BUILDERS:
        tokenizer = build_tokenizer()
        model = BUILDERS[name](len(tokenizer))
        _teach(model, tokenizer)
        save(model, directory, tokenizer)
    else:
        recipe = {"demo-vl": "pictures", "demo-calculator": "calculator"}[name]
        importlib.import_module(f"examples.demo.{recipe}").make(directory)


def made_once(name: str, make: Callable[[str], None]) -> str:
    """Return the directory of a demo model. If it is not there, make(directory) fills one next to it, which is then renamed, so
    that a kill leaves no half-made model. Any process may ask. Raise UserError if nothing can be written."""
    target = directory(name)
    try:
        if is_made(target):
            return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if not is_made(target):
                _make_and_rename(target, VERSIONS[name], make)
    except OSError as error:
        raise UserError(
            f"--model {name}: it is made once, in {target.parent}, which cannot be written ({error.strerror or error}). Set "
            "RL_CACHE, in the environment, to a directory that can."
        ) from error
    return str(target)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process make the model. A wait for another one is no hang: that process has a watchdog of its own."""
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
    for left in target.parent.glob(f"{target.name}-*"):  # by a killed process: no other process makes one now
        shutil.rmtree(left, ignore_errors=True)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    started = time.time()
    work = tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent)
    torch.manual_seed(0)
    # One thread: the number of threads changes the bits of sums, and on a busy machine threads wait long for each other.
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
    """One token a character; special begins with the pad and the end token. transformers loads this class for all demos."""
    vocab = {token: i for i, token in enumerate([*special, *characters, "Ġ", "Ċ"])}
    names = dict(pad_token=special[0], eos_token=special[1], unk_token=None, bos_token=None)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=special[2:], **names)
    tokenizer.chat_template = chat_template
    return tokenizer


def build_model(vocab_size: int, layers: int = 4) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, num_hidden_layers=layers, intermediate_size=512, **SHAPE))


def build_mixture(vocab_size: int) -> PreTrainedModel:
    """A tiny Qwen3-MoE. Each token goes to 2 of 8 experts: as many active parameters as `--model demo`, about 3M in all."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocab_size, num_hidden_layers=4, head_dim=32, **experts, **SHAPE))


def build_hybrid(vocab_size: int) -> PreTrainedModel:
    """A tiny Qwen3.5 of about 0.5M parameters: one layer is a gated delta net, one attends. The heads of the states have 128
    elements, so that vLLM can compute them on a CPU (with --rollout-dtype bfloat16)."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        head_dim=32,
        intermediate_size=512,
        **SHAPE,
    )
    return Qwen3_5ForCausalLM(config)


BUILDERS = {"demo": build_model, "demo-moe": build_mixture, "demo-hybrid": build_hybrid}


def save(model: PreTrainedModel, directory: str, tokenizer: Qwen2Tokenizer) -> None:
    """Write the tokenizer, and the files of model.save_pretrained, which writes on the job's first rank alone."""
    tokenizer.save_pretrained(directory)
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tensors = {}
    for name, parameter in model.named_parameters():  # tied ones once
        tensors |= {part: tensor.contiguous() for part, tensor in on_hub(model, name, parameter.detach()).items()}
    save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})


def _teach(
    model: PreTrainedModel, tokenizer: Qwen2Tokenizer, most_steps: int = 1500, settling_steps: int = 250, wrong_steps: int = 400
) -> None:
    """Right sums until it can add, and some more until that has settled; then wrong ones until it usually does not. After a
    fixed number of steps some models could not add: it depends on luck and on the processor."""
    rng = random.Random(0)
    pairs = [tuple(map(int, p["prompt"][0]["content"].rstrip("=").split("+"))) for p in problems("train")]

    def loss(share_right: float) -> torch.Tensor:
        batch = [rng.choice(pairs) for _ in range(32)]
        answers = [a + b if share_right == 1 or rng.random() < share_right else wrong_sum(a, b, rng) for a, b in batch]
        return loss_of(model, [_demonstration(tokenizer, a, b, c) for (a, b), c in zip(batch, answers, strict=True)])

    def accuracy() -> float:
        return share_right(model, [_demonstration(tokenizer, a, b, a + b) for a, b in pairs[:256]])

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
    ends: Callable[[], bool] = lambda: False  # asked every `every` steps: whether the phase ends there
    every: int = 1


def train_in(model: PreTrainedModel, phases: list[Phase], description: str) -> None:
    """Supervised training, phase after phase. Each has an optimizer of its own, without the momentum of the one before."""
    print(description, flush=True)
    for phase in phases:
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, phase.beta2), weight_decay=0.0, fused=True)
        for step in track(range(phase.steps), f"{description}: {phase.name}", transient=True):
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


Demonstration = tuple[list[int], list[bool]]  # token ids, and which of them are trained


@cache
def _demonstration(tokenizer, a: int, b: int, answer: int) -> Demonstration:
    """A problem with an answer, whose characters and end token are trained. Each occurs some twenty times."""
    conversation = [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(answer)}]
    ids = tokenizer.apply_chat_template(conversation, return_dict=False)
    prompt = ids.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1
    return ids, [False] * prompt + [True] * (len(ids) - prompt)


def loss_of(model: PreTrainedModel, rows: list[Demonstration]) -> torch.Tensor:
    """Cross-entropy of the trained tokens."""
    logits, ids, trained = _logits(model, rows)
    return F.cross_entropy(logits[trained], ids[trained])


@torch.no_grad()
def share_right(model: PreTrainedModel, rows: list[Demonstration]) -> float:
    """The share of rows whose trained tokens greedy decoding gives: each is the likeliest one after the tokens before it."""
    logits, ids, trained = _logits(model, rows)
    return ((logits.argmax(-1) == ids) | ~trained).all(1).float().mean().item()


def _logits(model: PreTrainedModel, rows: list[Demonstration]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [B, L, V] of the rows, right-padded; the tokens that follow [B, L], and which of them are trained [B, L]."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    trained = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in rows])
    return model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:], trained[:, 1:]
