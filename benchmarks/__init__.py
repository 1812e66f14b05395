"""Measures the ops against what PyTorch users have today: `poe bench`, or `python -m benchmarks`.

One file for each idea: `shapes`, `case` and `ops` say what is measured, `provider`, `providers`,
`parts` and `peers` who computes it, `check` whether the result is right, `timing` and `memory` how
it is measured, `interference` what it costs the ops around it, `environment` on which machine,
`runs` what is kept of it, `report`, `baseline` and `plots` how it is shown. `results/` has the
committed runs.

A run: `command_line` makes a `plan` of what `cli` was asked for, and `runner` carries it out. For
each case it asks the `roster` who takes part, `admission` who of them is right, and `measuring` how
long they take. What one of them raises is kept in its result by `failures`, and the others go on.
"""
