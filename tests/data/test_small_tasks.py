"""The tasks for a small pretrained model: every question has the answer that is said, and the reward finds it in a response."""

import json
import re

import pytest
from families import end_tokens, tokenizer_of

from examples.small_tasks import KINDS, TASKS, called, rows, score
from examples.tools import calculate
from rl.data.demonstrations import DemonstrationArgs, Demonstrations
from user_processes.programs import Programs
from user_processes.turns import Turns

TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
NAMES = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
NUMBERS = TENS | {name: i for i, name in enumerate([*NAMES.split(), "nineteen"], 1)}


def number(words: str) -> int:
    return sum(NUMBERS[word] for word in words.split("-"))


def answer(task: str, question: str) -> str:
    """What a person would answer."""
    if task == "choice":
        kind, options = re.fullmatch(r"Which of these is (.*): (.*)\?", question).groups()
        (right,) = (option for option in re.split(", | or ", options) if option in KINDS[kind].split())
        return right
    if task == "words":
        first, sign, second = re.match(r"What is (\S+) (plus|minus) (\S+)\?", question).groups()
        return str(number(first) + (number(second) if sign == "plus" else -number(second)))
    first, sign, second = re.findall(r"What is (\d+) (plus|times) (\d+)\?", question)[-1]
    return str(int(first) + int(second) if sign == "plus" else int(first) * int(second))


@pytest.mark.parametrize("task", TASKS)
def test_every_row_has_the_right_answer_and_none_comes_twice(task):
    made = list(rows(task, 600, seed=0))
    questions = [row["extra_info"]["question"] for row in made]
    assert len(made) == len(set(questions)) == 600
    assert all(row["prompt"] == [{"role": "user", "content": question}] for row, question in zip(made, questions, strict=True))
    assert [row["reward_model"]["ground_truth"] for row in made] == [answer(task, question) for question in questions]
    assert list(rows(task, 600, seed=0)) == made


@pytest.mark.parametrize(
    ("source", "response", "truth", "wanted"),
    [
        ("small/times", "62 times 3 is 186.", "186", 1.0),
        ("small/times", "186, so 62 times 3 is 187", "186", 0.0),  # the last number counts
        ("small/times", "It is 1,186.", "1186", 1.0),
        ("small/words", "I do not know.", "53", 0.0),
        ("small/choice", "An Apple is a fruit.", "apple", 1.0),
        ("small/choice", "It is apple, not saw.", "apple", 0.0),  # only one may be named
        ("small/choice", "Pineapple", "apple", 0.0),
        ("openai/gsm8k", "41 + 12 = 53\n#### 53", "53", 1.0),
        ("openai/gsm8k", "53", "53", 0.0),  # not in the form
    ],
)
def test_the_reward_reads_the_answer(source, response, truth, wanted):
    found = score(source, response, truth, {"question": "Which of these is a fruit: saw, apple, Peru or red?"})
    assert (found["score"] if isinstance(found, dict) else found) == wanted


def test_a_task_of_reasoning_gym_has_its_own_grader():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    for row in rows("reasoning-gym:letter_counting", 20, seed=0):
        truth = row["reward_model"]["ground_truth"]
        assert score(row["data_source"], truth, truth, row["extra_info"]) == 1.0
        assert score(row["data_source"], f"{truth}7", truth, row["extra_info"]) < 1.0


def test_a_demonstration_of_a_call_has_the_tokens_of_an_episode(tmp_path):
    tokenizer, ends = tokenizer_of("smollm2"), end_tokens("smollm2")
    (row,) = rows("times", 1, seed=0)
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps(called(row)))
    demonstration = Demonstrations([str(file)], "train", tokenizer, DemonstrationArgs(max_length=4096), ends)[0]
    sampled = [[]]
    for token, trained in zip(demonstration.ids.tolist(), demonstration.trained, strict=True):
        if trained:
            sampled[-1].append(token)
        elif sampled[-1]:
            sampled.append([])
    turns = Turns(tokenizer, Programs([calculate], are_tools=True).schemas(), ends, "hermes")
    (call,) = turns.message(sampled[0])["calls"]
    answer = str(calculate(**call["arguments"]))
    between = turns.between([{"role": "tool", "name": call["name"], "content": answer}])
    episode = turns.prompt(row["prompt"], []) + sampled[0] + between + sampled[1]
    assert episode == demonstration.ids.tolist()[: len(episode)]
    assert answer == turns.message(sampled[1])["content"] == row["reward_model"]["ground_truth"]
