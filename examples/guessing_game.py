"""An environment of several turns: the model guesses a number and learns whether the secret is lower or higher.

    python train_sync.py --env examples/guessing_game.py:Guess --max-turns 6 ...

The row's ground truth is the number. See docs/agents.md.
"""


class Guess:
    """One game. The fewer guesses it takes, the higher the reward."""

    def reset(self, row: dict, seed: int) -> None:
        """Begin a game."""
        self.secret, self.tries = int(row["ground_truth"]), 0

    def step(self, message: dict) -> tuple[list[dict], float | None, bool]:
        """Answer a guess."""
        self.tries += 1
        try:
            guess = int(message["content"].split()[-1].rstrip("."))
        except (IndexError, ValueError):
            return [{"role": "user", "content": "Say a number."}], None, False
        if guess == self.secret:
            return [], 1.0 / self.tries, True
        return [{"role": "user", "content": "Lower." if guess > self.secret else "Higher."}], None, False
