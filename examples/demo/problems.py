"""The problems of the demo: sums of two numbers. sums.py teaches a model to add."""

import random

LARGEST = 49
NUM_VALIDATION = 500  # of the 2,500 problems; the other 2,000 are for training


def problems(split: str) -> list[dict]:
    """All problems a + b with 0 <= a, b <= 49 of a split ("train" or "val"). The splits share none."""
    numbers = range(LARGEST + 1)
    return rows_of([(f"{a}+{b}=", a + b) for a in numbers for b in numbers], NUM_VALIDATION, split)


def rows_of(problems: list[tuple[str, int]], validation: int, split: str) -> list[dict]:
    """Rows of a split in verl's layout. problems: all (question, answer). validation: the number of those for "val"."""
    random.Random(0).shuffle(problems)
    chosen = problems[:validation] if split == "val" else problems[validation:]
    return [
        {
            "data_source": "demo",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": str(answer)},
            "extra_info": {"split": split, "index": i},
        }
        for i, (question, answer) in enumerate(chosen)
    ]
