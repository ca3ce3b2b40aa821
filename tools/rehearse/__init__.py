"""rehearse.py: what a reward function pays, tried before a policy does."""
