"""The learners' side: batches, the learner, its optimizer, and what saves memory and arithmetic.

Never imports rl/generation: samples come one way (rl/samples), weights go the other (rl/weights)."""
