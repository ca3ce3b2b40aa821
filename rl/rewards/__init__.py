"""Rewards: built-in graders, judges, a sandbox for programs, and the pool of processes that runs them or the user's function.

A scoring process imports this folder without importing torch."""
