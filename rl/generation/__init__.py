"""The generators' side: the engine's contract, the engines, and a generator's turn.

Never imports rl/learning: samples go one way (rl/samples), weights the other (rl/weights)."""
