"""The transport of bytes between ranks: a ring within a node, a relay to another node, a bridge from one rank to many.

Left out: the content, samples (rl/samples) and weights (rl/weights)."""
