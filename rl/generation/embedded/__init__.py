"""The engine over transformers: continuous batching in the learner's own process and precision."""
