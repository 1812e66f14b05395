"""The passes over rows around matrix products: norms and activations, forward and backward, on CPUs and GPUs."""
