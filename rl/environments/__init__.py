"""Environments, tools and agents: their processes, the tokens between turns, and the calls in a model's text."""
