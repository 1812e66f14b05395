"""Measurements of kinds of devices, and the models that choose how a call runs from them."""
