"""The generators' side: the engine's contract, the engines, and the generator that drives one.

It never imports rl/learning: samples go one way (rl/samples), weights the other (rl/weights)."""
