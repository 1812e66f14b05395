"""Who runs a call: each backend accepts it or declines it."""
