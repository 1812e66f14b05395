"""Puzzle 22's ops through MAX, and what the drivers in `solutions/` share."""
