"""Models with layers that have a recurrent state in the place of attention: Qwen3.5 and Qwen3-Next."""
