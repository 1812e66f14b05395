"""What `head_worker.py` tries in several processes: options, vocabularies, placements of x.

"kernels" are those for Hopper in bfloat16: PyTorch's ops stand in for them on CPUs. "cuda" are
cases in bfloat16 on the first GPU, which all processes use.
"""

from __future__ import annotations

from typing import Any

KERNELS, CUDA = "kernels", "cuda"
DTYPES = ("float64", "float32", "bfloat16", KERNELS)
PLACES = ("R", "S(0)")
# "V" and "std" make the case; a weight that is True is drawn.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias, ignored, chunks": {"bias": True, "chunk_rows": 3},
    "smoothing of weighted classes": {
        **{"label_smoothing": 0.1, "class_weight": True, "bias": True, "reduction": "sum"},
    },
    "smoothing, z_loss, softcap": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0},
    "z_loss, softcap": {"z_loss": 0.1, "softcap": 3.0, "chunk_rows": 5},
    "rows": {"reduction": "none", "token_weight": True, "of_logsumexp": 1.0},
    "mean of weighted rows": {"token_weight": True, "class_weight": True},
    "large logits": {"std": 50.0, "V": 301},
}
# Not a multiple of the processes; fewer than they are; one; of a bias that kernels take.
VOCABULARIES: dict[str, dict[str, Any]] = {
    f"{V} classes": {"V": V, "bias": True} for V in (1, 3, 5, 1001, 1008)
}
NAMES = [
    *(f"{name}; {place}; {dtype}" for name in OPTIONS for place in PLACES for dtype in DTYPES),
    *(f"{name}; R; {dtype}" for name in VOCABULARIES for dtype in DTYPES),
    *("leaves", "norm", "compiled", "other placements"),
    *("one huge logit", "as many kernels as chunks", "as many chunks in all processes"),
]
GPU_NAMES = [f"{name}; R; {CUDA}" for name in (*OPTIONS, *VOCABULARIES)]
