"""Matrix products that know of nothing but a, b and c: c[M, N] = epilogue(a[M, K] @ b[N, K]^T)."""
