"""Norm followed by a Linear layer on a CPU, forward and backward."""
