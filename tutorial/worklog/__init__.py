"""The steps of docs/worklog.md: their kernels, and what checks, times and draws them."""
