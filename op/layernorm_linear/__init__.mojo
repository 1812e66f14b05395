"""LayerNorm followed by a Linear layer, forward and backward, per target."""
