"""Holds the kernels of Puzzle 22 as the documents have them: readable first."""
