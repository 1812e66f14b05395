"""Runs row programs: stages of map, reduce and map over one row that never leaves the chip."""
