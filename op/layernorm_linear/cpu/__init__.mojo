"""CPU kernels: a register-blocked matrix product with the LayerNorm in it."""
