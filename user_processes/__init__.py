"""The processes that run the user's code: reward functions, environments, tools and agents.

A rank starts one process for each kind (server.py): scoring.py, or worker.py. It forks one for each episode, or for scoring
(child.py). Nothing here knows of training: see tests/project/test_layers.py for the few files of rl/ that these import."""
