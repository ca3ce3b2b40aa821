"""Environments, tools and agents as a rank sees them. What runs in their processes is in user_processes/."""
