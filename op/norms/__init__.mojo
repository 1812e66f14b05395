"""Norms as formulas: statistics, how it is applied, and its terms in the gradient of x."""
