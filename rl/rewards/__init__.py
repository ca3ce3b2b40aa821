"""Scores: the built-in graders, judges, a sandbox for programs, and the pool of processes that run them or the user's function.

A scoring process imports this folder without torch."""
