"""Norm followed by a Linear layer: the one plan, and how norms, products and row programs are put together."""
