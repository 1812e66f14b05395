"""Products of few rows: a kernel whose blocks stream the other operand once."""
