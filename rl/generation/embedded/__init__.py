"""The engine over transformers: continuous batching in the learner's process and precision."""
