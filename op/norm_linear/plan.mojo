"""The strategies of a pass, by the numbers that `Call.strategy` holds.

Each backend's plans (cpu/plan.mojo, sm90/forward_plan.mojo and backward_plan.mojo) choose one and the size of the
workspace. fused_norm/chain/call.h and fused_norm/call/record.py have the same numbers.
"""

comptime DECLINED = 0
"""Another backend is faster, or none of this one's kernels takes the call."""
comptime FUSED = 1
"""One call does all: on a CPU a product that normalizes rows as it packs them, on Hopper our own products."""
comptime KEPT_FOLD = 2
"""A product of x itself and a folded weight that is kept; its epilogue finishes the norm."""
comptime NEW_FOLD = 3
"""The same with a weight folded in this call."""
comptime AROUND_PRODUCTS = 4
"""Our row kernels, around PyTorch's products."""
