"""The embedded demo: a model of about 1M parameters and two-number additions, made on the spot, nothing downloaded.

`--model demo` and `--train-files demo` resolve to this file; nothing else in the project knows about it. The model is an
ordinary Hugging Face directory in a cache folder. It is taught in two phases: right sums first, then mostly wrong ones, so
that it can add but usually does not. That is what reinforcement learning can mend: a model that had never added right
would get no reward to learn from, one that always did would have nothing to learn.
"""

import json
import os
import random
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rl.progress import track

VERSION = 1  # of the recipe below: another one makes another model, in another folder
LARGEST = 49
NUM_VALIDATION = 500  # of the 2,500 problems; the other 2,000 are for training
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
CHARACTERS = "0123456789+="
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def cache_dir() -> Path:
    """The directory of the demo's model: $RL_CACHE, else ~/.cache/rl-scripts."""
    return Path(os.environ.get("RL_CACHE") or Path.home() / ".cache" / "rl-scripts")


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
    target = cache_dir() / f"demo-v{VERSION}"
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not (target / "config.json").exists():
                _make(target)
    return str(target)


def build_tokenizer() -> Qwen2Tokenizer:
    """One token a character. The class is Qwen2's own: transformers loads that one for the model type, whatever was saved."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS, "Ġ", "Ċ"])}
    names = dict(pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=None, bos_token=None)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=SPECIAL[2:], **names)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(vocab_size: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def _make(target: Path) -> None:
    """Trains and saves beside the target, then renames: a killed process leaves no half-made model."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    started = time.time()
    _teach(model, tokenizer)
    torch.set_rng_state(state)
    work = tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    with open(Path(work) / "made.json", "w") as file:
        json.dump({"seconds": round(time.time() - started, 1), "recipe_version": VERSION}, file)
    if target.exists():
        shutil.rmtree(target)  # a remnant without config.json
    os.rename(work, target)


def _teach(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, right_steps: int = 450, wrong_steps: int = 60) -> None:
    """Supervised training in two phases: right sums at 2e-3, falling, then 80% wrong ones at a quarter of it."""
    rng = random.Random(0)
    pairs = [tuple(map(int, p["prompt"][0]["content"].rstrip("=").split("+"))) for p in problems("train")]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    for step in track(range(right_steps + wrong_steps), "making the demo model (once)"):
        right_phase = step < right_steps
        if step == right_steps:  # the first phase's momentum would carry the model on
            optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
        falling = min(1, (step + 1) / 20) * max(0.1, 1 - step / right_steps)
        optimizer.param_groups[0]["lr"] = 2e-3 * (falling if right_phase else 0.25)
        batch = [rng.choice(pairs) for _ in range(128)]
        answers = [a + b if right_phase or rng.random() < 0.2 else wrong_sum(a, b, rng) for a, b in batch]
        loss = _demonstration_loss(model, tokenizer, batch, answers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


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
    """Cross-entropy of the answer's characters and the end token, right-padded."""
    rows = [_demonstration(tokenizer, a, b, answer) for (a, b), answer in zip(batch, answers, strict=True)]
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])  # [128, L]
    answer_from = torch.tensor([row.index(assistant) for row in rows])[:, None]
    length = torch.tensor([len(row) for row in rows])[:, None]
    column = torch.arange(longest - 1)[None]
    trained = (column >= answer_from) & (column < length - 1)  # [128, L - 1], of the predicting positions
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits[trained], ids[:, 1:][trained])
