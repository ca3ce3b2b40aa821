"""From hidden states to what losses need: the product with the head, log-probs of chosen tokens, entropies."""
