"""The demo of tools: `--env demo-calculator` trains a model that cannot multiply, and rarely asks the calculator that can.

It is taught how to ask and what to do with the answer, but to guess first in nine of ten problems. Reinforcement learning finds
that asking pays. Smaller than the demo of additions: 2 layers, made in half a minute.
"""

import random

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Qwen2Tokenizer

from rl.data import demo
from rl.data.demo_cache import VERSIONS

VERSION = VERSIONS["demo-calculator"]  # of the recipe below
ASKS = 0.1  # of the answers it is taught
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "'  # one token each: it has to learn the numbers only
END_OF_CALL = '"}}</tool_call>'
SPECIAL = [*demo.SPECIAL, "<|tool|>", CALL, END_OF_CALL]
CHARACTERS = "0123456789*=" + "abcdefghijklmnopqrstuvwxyz :'"  # the letters are those of error messages
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') }}{% if m['role'] == 'assistant' %}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def problems(split: str) -> list[dict]:
    """Products of two-digit numbers of a split ("train" or "val"), in verl's layout. The splits share none."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[:200] if split == "val" else pairs[200:]
    return [
        {
            "data_source": "demo",
            "prompt": [{"role": "user", "content": f"{a}*{b}="}],
            "reward_model": {"style": "rule", "ground_truth": str(a * b)},
            "extra_info": {"split": split, "index": i},
        }
        for i, (a, b) in enumerate(chosen)
    ]


def model_dir() -> str:
    """The model's directory; trains it first if it is not there. Several processes may ask at once."""
    return demo.made_once("demo-calculator", VERSION, _make)


def _make(directory: str) -> None:
    tokenizer = demo.tokenizer_of(SPECIAL, CHARACTERS, CHAT_TEMPLATE)
    model = demo.build_model(len(tokenizer), layers=2)
    _teach(model, tokenizer)
    demo.save(model, directory)
    tokenizer.save_pretrained(directory)


def _teach(model: PreTrainedModel, tokenizer: Qwen2Tokenizer) -> None:
    """Until it gives the tool's answer nearly always."""
    rng = random.Random(0)
    pairs = [tuple(map(int, row["prompt"][0]["content"].rstrip("=").split("*"))) for row in problems("train")]
    asking = demo.Phase(
        "asking and guessing",
        1500,
        lambda: _loss(model, tokenizer, pairs, rng),
        1e-3,
        0.98,
        falling=False,
        ends=lambda: _uses_answers(model, tokenizer, pairs[:128]) > 0.97,
        every=20,
    )
    demo.train_in(model, [asking], "making the demo-calculator model (once)")


def _rows(tokenizer: Qwen2Tokenizer, problem: tuple[int, int], answer: str | None) -> tuple[list[int], list[bool]]:
    """A conversation's token ids, and which of them the model says. answer: a guess; None asks."""
    a, b = problem
    parts = [f"<|user|>{a}*{b}=<|assistant|>", f"{answer}<|end|>"]  # the user's, the model's and so on
    if answer is None:
        parts[1:] = [f"{CALL}{a}*{b}{END_OF_CALL}<|end|>", f"\n<|tool|>{a * b}<|assistant|>", f"{a * b}<|end|>"]
    ids, mask = [], []
    for number, of_part in enumerate(tokenizer(parts)["input_ids"]):
        ids += of_part
        mask += [number % 2 == 1] * len(of_part)
    return ids, mask


def _loss(model: PreTrainedModel, tokenizer: Qwen2Tokenizer, pairs: list[tuple[int, int]], rng: random.Random) -> torch.Tensor:
    """Half of the conversations ask, so that it learns how; of few of them it learns to ask."""
    rows = []
    for _ in range(32):
        (a, b), asks = rng.choice(pairs), rng.random() < 0.5
        ids, mask = _rows(tokenizer, (a, b), None if asks else str(max(100, a * b + rng.randint(-600, 600))))
        if asks and rng.random() > ASKS / (1 - ASKS):
            mask[ids.index(tokenizer.convert_tokens_to_ids(CALL))] = False
        rows.append((ids, mask))
    logits, ids, mask = _logits(model, rows)
    return F.cross_entropy(logits[mask], ids[mask])


@torch.no_grad()
def _uses_answers(model: PreTrainedModel, tokenizer: Qwen2Tokenizer, pairs: list[tuple[int, int]]) -> float:
    """Of these problems, how many it gets right greedily once it asks."""
    logits, ids, mask = _logits(model, [_rows(tokenizer, pair, None) for pair in pairs])
    asks = ids == tokenizer.convert_tokens_to_ids(CALL)
    return ((logits.argmax(-1) == ids) | ~mask | asks).all(1).float().mean().item()


def _logits(
    model: PreTrainedModel, rows: list[tuple[list[int], list[bool]]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [B, L, V] of the rows, right-padded; the tokens that follow [B, L], and which the model says [B, L]."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    mask = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in rows])
    return model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:], mask[:, 1:]
