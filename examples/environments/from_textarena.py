"""The games of TextArena that one plays alone: GuessTheNumber-v0, Minesweeper-v0, FrozenLake-v0, Sudoku-v0 and so on.

    pip install textarena
    for game in $(seq 64); do echo "{\\"data_source\\": \\"guess\\", \\"game\\": $game}"; done > games.jsonl
    torchrun --standalone --nproc-per-node 2 train_async.py --model Qwen/Qwen3-0.6B --env textarena:GuessTheNumber-v0 \\
        --train-files games.jsonl --val-files games.jsonl --max-turns 20 --max-prompt-length 512 --max-response-length 2048

The rows need no column: the game draws what is to be guessed. All responses to a prompt play the same one. The score is the
game's, when it has ended; a game that the limits cut gets 0. Left out: games of several players. Games that look words up, such
as Wordle and Hangman, download a list with nltk.
"""

import textarena

from rl.errors import UserError


class Game:
    """One game."""

    game = ""

    def reset(self, row: dict | None, seed: int) -> list[dict]:
        """Begin it."""
        self.env = textarena.make(f"{self.game}-raw")  # without the wrapper that repeats all that was said
        self.env.reset(num_players=1, seed=seed)
        return self._told()

    def step(self, message: dict) -> tuple[list[dict], float | None, bool]:
        """Make a move."""
        done, _ = self.env.step(message["content"])
        if done:
            rewards, _ = self.env.close()
            return [], rewards[0], True
        return self._told(), None, False

    def _told(self) -> list[dict]:
        _, observations = self.env.get_observation()
        told = [text for speaker, text, _ in observations if speaker == textarena.GAME_ID]
        return [{"role": "user", "content": "\n".join(told)}]


def from_name(game: str) -> list[type]:
    """Return the class of a game. Raise UserError if it cannot begin with one player."""
    made = type(game, (Game,), {"game": game})
    try:
        made().reset(None, seed=0)
    except Exception as error:
        raise UserError(f"TextArena's {game!r} does not begin for one player: {type(error).__name__}: {error}.") from None
    return [made]
