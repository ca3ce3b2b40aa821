"""Environments and tools: their processes, the tokens between turns, and the calls in a model's text."""
