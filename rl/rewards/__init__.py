"""Rewards: the built-in graders, and the processes that run them or the user's function.

A scoring process imports this folder without importing torch."""
