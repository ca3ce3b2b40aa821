"""Processes that run the user's code: reward functions, environments and tools.

A rank starts one process for each kind (server.py), which forks all others (child.py)."""
