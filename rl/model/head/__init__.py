"""From hidden states to log-probs of chosen tokens and entropies, through the product with the output head."""
