"""Holds every kernel of fused_norm: LayerNorm followed by a Linear layer."""
