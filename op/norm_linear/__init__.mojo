"""Norm followed by a Linear layer: plans, and passes made of norms, products and row programs."""
