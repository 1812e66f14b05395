"""The fused op on Hopper GPUs (sm_90a)."""
