"""How bytes travel between ranks: a ring within a node, a relay to another, a bridge from one to many.

Knows no group and no weight: rl/samples and rl/weights say what is sent."""
