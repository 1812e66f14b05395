"""Products on a CPU: packing, microkernel, epilogue."""
