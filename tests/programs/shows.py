"""Environments that draw: each asks for the number in a picture, as the demo with images does, and then for that in another."""

import random

from examples.demo.pictures import QUESTION, draw


def picture(number: int):
    return draw(number, lower=bool(number % 2), rng=random.Random(number))


def asked(number: int) -> dict:
    return {"role": "user", "content": [{"type": "image", "image": picture(number)}, {"type": "text", "text": QUESTION}]}


def following(number: int) -> int:
    return 10 + (number + 7) % 90


class Shows:
    """The row has the first picture."""

    def reset(self, row, seed):
        self.number, self.turns = int(row["ground_truth"]), 0

    def step(self, message):
        is_right = message["content"] == str(self.number)
        self.number, self.turns = following(self.number), self.turns + 1
        return [asked(self.number)], float(is_right), self.turns == 2


class Begins(Shows):
    """reset draws the first one."""

    def reset(self, row, seed):
        super().reset(row, seed)
        return [asked(self.number)]


class Differs(Shows):
    """Draws another picture each time."""

    def step(self, message):
        self.number = random.SystemRandom().randrange(10, 99)
        return super().step(message)
