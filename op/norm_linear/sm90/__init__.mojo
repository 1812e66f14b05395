"""Norm + Linear on Hopper: a norm's kernels and hooks around the products of op/gemm/sm90."""
