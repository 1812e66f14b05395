"""A call as kernels see it: its record, and parameters that are recognized."""
