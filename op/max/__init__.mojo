"""The kernels as ops of MAX."""
