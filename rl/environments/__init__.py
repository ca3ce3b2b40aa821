"""Environments and tools: responses of several turns. Their processes, the tokens between turns, and calls in a model's text."""
