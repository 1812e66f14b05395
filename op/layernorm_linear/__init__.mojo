"""LayerNorm followed by a linear layer: kernels, one folder per target."""
