"""Checkpoints: written, checked, resumed from; the best one."""
