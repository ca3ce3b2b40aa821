"""The demo of tools: `--env demo-calculator` trains a model that cannot multiply and rarely asks the calculator, which can.

It is taught how to ask and how to use the answer, but guesses in nine of ten problems. Reinforcement learning finds that asking
pays. It is smaller than the demo of additions: 2 layers, made in half a minute.
"""

import random

import torch
from transformers import PreTrainedModel, Qwen2Tokenizer

from examples.demo import sums as demo
from examples.demo.problems import rows_of
from user_processes.tools import KNOWN

ASKS = 0.1  # the part of the taught decisions that ask
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "'  # one token each: it only learns the numbers
END_OF_CALL = '"}}</tool_call>'
SPECIAL = [*demo.SPECIAL, "<|tool|>", CALL, END_OF_CALL]
CHARACTERS = "0123456789*=" + "abcdefghijklmnopqrstuvwxyz :'"  # the letters are those of error messages
CHAT_TEMPLATE = (
    KNOWN + "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') }}{% if m['role'] == 'assistant' %}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def problems(split: str) -> list[dict]:
    """Products of two-digit numbers of a split ("train" or "val"). The splits share none."""
    numbers = range(10, 100)
    return rows_of([(f"{a}*{b}=", a * b) for a in numbers for b in numbers], 200, split)


def make(directory: str) -> None:
    """Teaches and saves the model."""
    tokenizer = demo.tokenizer_of(SPECIAL, CHARACTERS, CHAT_TEMPLATE)
    model = demo.build_model(len(tokenizer), layers=2)
    _teach(model, tokenizer)
    demo.save(model, directory, tokenizer)


def _teach(model: PreTrainedModel, tokenizer: Qwen2Tokenizer) -> None:
    """Until it gives the tool's answer nearly always, once it asks."""
    rng = random.Random(0)
    pairs = [tuple(map(int, row["prompt"][0]["content"].rstrip("=").split("*"))) for row in problems("train")]
    asked = [_row(tokenizer, pair, None, learns_to_ask=False) for pair in pairs[:128]]
    asking = demo.Phase(
        "asking and guessing",
        1500,
        lambda: _loss(model, tokenizer, pairs, rng),
        1e-3,
        0.98,
        falling=False,
        ends=lambda: demo.share_right(model, asked) > 0.97,
        every=20,
    )
    demo.train_in(model, [asking], "making the demo-calculator model (once)")


def _row(
    tokenizer: Qwen2Tokenizer, problem: tuple[int, int], answer: str | None, learns_to_ask: bool = True
) -> demo.Demonstration:
    """A conversation; of the model's words, all but perhaps its decision to ask is trained. answer: a guess; None asks."""
    a, b = problem
    parts = [f"<|user|>{a}*{b}=<|assistant|>", f"{answer}<|end|>"]  # the user's, the model's and so on
    if answer is None:
        parts[1:] = [f"{CALL}{a}*{b}{END_OF_CALL}<|end|>", f"\n<|tool|>{a * b}<|assistant|>", f"{a * b}<|end|>"]
    ids, mask = [], []
    for number, of_part in enumerate(tokenizer(parts)["input_ids"]):
        ids += of_part
        mask += [number % 2 == 1] * len(of_part)
    if not learns_to_ask:
        mask[ids.index(tokenizer.convert_tokens_to_ids(CALL))] = False
    return ids, mask


def _loss(model: PreTrainedModel, tokenizer: Qwen2Tokenizer, pairs: list[tuple[int, int]], rng: random.Random) -> torch.Tensor:
    """Half of the conversations ask, so that it learns how; few of them teach it to ask."""
    rows = []
    for _ in range(32):
        (a, b), asks = rng.choice(pairs), rng.random() < 0.5
        if asks:
            rows.append(_row(tokenizer, (a, b), None, rng.random() <= ASKS / (1 - ASKS)))
        else:
            rows.append(_row(tokenizer, (a, b), str(max(100, a * b + rng.randint(-600, 600)))))
    return demo.loss_of(model, rows)
