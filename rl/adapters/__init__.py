"""Adapters (LoRA): a frozen model with a few trained numbers next to its linear layers."""
