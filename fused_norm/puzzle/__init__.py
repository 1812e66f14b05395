"""What serves Puzzle 22 and the tutorial alone: its ops through MAX, and what its drivers share."""
