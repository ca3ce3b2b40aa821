"""Tasks that a small pretrained model learns in half an hour on a laptop: data in verl's layout, and the reward function.

    python examples/small_tasks.py times                          # data/times/{train,test}.parquet: What is 62 times 3?
    python examples/small_tasks.py words                          # What is eleven plus twelve?
    python examples/small_tasks.py form                           # sums whose answer has to end in "#### 53"
    python examples/small_tasks.py choice                         # Which of these is a fruit: saw, apple, Peru or red?
    python examples/small_tasks.py reasoning-gym:letter_counting  # any task of that package (pip install reasoning-gym)
    torchrun --standalone train_sync.py --train-files data/times/train.parquet --reward examples/small_tasks.py:score ...
    python examples/small_tasks.py times --demonstrations         # answers.parquet and calls.parquet, for train_sft.py

`score` takes the grader of GSM8K for `form`, and that of reasoning-gym for its tasks; the others get 1 or 0.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
KINDS = {
    "an animal": "dog cat horse lion tiger rabbit sheep goat wolf bear eagle shark snake duck mouse frog",
    "a fruit": "apple banana orange grape peach cherry lemon mango plum melon pear kiwi lime papaya",
    "a color": "red blue green yellow purple brown black white pink gray violet scarlet",
    "a country": "France Japan Brazil Egypt Canada India Norway Mexico Kenya Spain Chile Greece Peru Turkey",
    "a tool": "hammer saw drill wrench pliers screwdriver chisel shovel axe rake ladder",
    "a part of the body": "arm leg nose knee elbow finger shoulder ankle wrist stomach ear neck",
}
GYM, GSM8K = "reasoning-gym:", "openai/gsm8k"


def in_words(number: int) -> str:
    """Return a number from 0 to 99 in words."""
    if number < 20:
        return UNITS.split()[number]
    ten = TENS.split()[number // 10 - 2]
    return ten if number % 10 == 0 else f"{ten}-{UNITS.split()[number % 10]}"


def times(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randint(10, 99), rng.randint(2, 9)
    return f"What is {first} times {second}?", str(first * second)


def words(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randint(1, 24), rng.randint(1, 24)
    if rng.random() < 0.5:
        return f"What is {in_words(first)} plus {in_words(second)}? Answer with a number.", str(first + second)
    first, second = max(first, second), min(first, second)
    return f"What is {in_words(first)} minus {in_words(second)}? Answer with a number.", str(first - second)


def form(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    shown = "Question: What is 20 plus 3?\nAnswer: 20 + 3 = 23\n#### 23"  # without it SmolLM2 never writes ####
    return f"{shown}\n\nQuestion: What is {first} plus {second}?\nAnswer:", str(first + second)


def choice(rng: random.Random) -> tuple[str, str]:
    kinds = rng.sample(sorted(KINDS), 4)
    options = [rng.choice(KINDS[kind].split()) for kind in kinds]
    right = rng.randrange(4)
    first, second, third, last = options
    return f"Which of these is {kinds[right]}: {first}, {second}, {third} or {last}?", options[right]


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "times": times,
    "words": words,
    "form": form,
    "choice": choice,
}


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float | dict:
    """Return 1.0 if the response's answer is right, and else 0.0: for `times` and `words` the answer is the last number,
    for `choice` the only one of the four that it names. A task of reasoning-gym has its own grader, whose scores may lie
    between."""
    if data_source.startswith(GYM):
        import reasoning_gym

        grade = reasoning_gym.get_score_answer_fn(data_source.removeprefix(GYM))
        return float(grade(solution_str.strip(), json.loads(extra_info["entry"])))
    if data_source == GSM8K:
        from math_grader.graders import gsm8k

        return gsm8k(data_source, solution_str, ground_truth)
    if data_source == "small/choice":
        options = re.findall(r"\w+", extra_info["question"].partition(":")[2].replace(" or ", " "))
        named = {*re.findall(r"\w+", solution_str.lower())}
        return float([option for option in options if option.lower() in named] == [ground_truth])
    answers = re.findall(r"\d+", solution_str.replace(",", ""))
    return float(bool(answers) and answers[-1] == ground_truth)


def rows(task: str, count: int, seed: int) -> Iterator[dict]:
    """Yield `count` different rows."""
    if task.startswith(GYM):
        import reasoning_gym

        for entry in reasoning_gym.create_dataset(task.removeprefix(GYM), size=count, seed=seed):
            yield row(task, entry["question"], entry["answer"] or "", entry=json.dumps(entry, default=str))
        return
    rng = random.Random(seed)
    different = dict(TASKS[task](rng) for _ in range(4 * count))
    if len(different) < count:
        sys.exit(f"error: {task} has not {count:,} different questions. Give smaller --train and --test.")
    for question, answer in list(different.items())[:count]:
        yield row(GSM8K if task == "form" else f"small/{task}", question, answer)


def row(data_source: str, question: str, answer: str, **more) -> dict:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"question": question} | more,
    }


def answered(row: dict) -> dict:
    """Return a conversation that ends in the bare answer."""
    return {"messages": [*row["prompt"], {"role": "assistant", "content": row["reward_model"]["ground_truth"]}]}


def called(row: dict) -> dict:
    """Return a conversation of `times` in which the model has examples/tools.py:calculate do the work, with the tokens of an
    episode of SmolLM2 with --tools examples/tools.py:calculate --tool-format hermes."""
    from transformers.utils import get_json_schema

    from examples.tools import calculate
    from user_processes.tools import Tools

    first, second = re.findall(r"\d+", row["extra_info"]["question"])
    call = json.dumps({"name": "calculate", "arguments": {"expression": f"{first} * {second}"}})
    answer = row["reward_model"]["ground_truth"]
    talk = [
        *Tools([get_json_schema(calculate)], "hermes", is_native=False).described(row["prompt"]),
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": talk}


def main() -> None:
    from examples.make_data import write  # late: a scoring process needs none of these
    from rl.errors import UserError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help=f"one of {', '.join(TASKS)}, or {GYM}NAME")
    parser.add_argument("--out", type=Path, help="directory to write to; by default data/<task>")
    parser.add_argument("--train", type=int, default=400, help="training rows")
    parser.add_argument("--test", type=int, default=200, help="validation rows: none of them is a training row")
    parser.add_argument("--demonstrations", action="store_true", help="write training rows also as conversations to imitate")
    args = parser.parse_args()
    if args.task not in TASKS and not args.task.startswith(GYM):
        sys.exit(f"error: {args.task} is no task. Choose one of {', '.join(TASKS)}, or {GYM}NAME.")
    out = args.out or Path("data", args.task.replace(":", "-"))
    made = list(rows(args.task, args.train + args.test, seed=0))
    files = {"train": made[: args.train], "test": made[args.train :]}
    if args.demonstrations:
        files["answers"] = [*map(answered, files["train"])]
        if args.task == "times":
            files["calls"] = [*map(called, files["train"])]
    for name, part in files.items():
        try:
            write(out / f"{name}.parquet", part)
        except UserError as error:
            sys.exit(f"error: {error}")
        print(f"{out / name}.parquet: {len(part):,} rows")


if __name__ == "__main__":
    main()
