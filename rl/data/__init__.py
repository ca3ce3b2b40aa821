"""Prompts and their images: tables, their order, tokens; the demos' problems and models."""
