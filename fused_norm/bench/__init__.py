"""Measures the ops against what PyTorch users have today: `python -m fused_norm bench`.

One file for each idea: `shapes` and `ops` say what is measured, `providers` who computes it,
`check` whether the result is right, `timing` and `memory` how it is measured, `runner` in which
order, `results` what is kept of it, `report`, `baseline` and `plots` how it is shown.
"""
