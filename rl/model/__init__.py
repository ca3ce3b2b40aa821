"""The forward pass that generation and learning share: loading, attention over packed rows, layers, experts, images."""
