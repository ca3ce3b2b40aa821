"""Rewards: the built-in graders, and scores of the user's function, which runs in processes of user_processes/.

A scoring process imports this folder without importing torch."""
