"""The shapes that are measured, by name: M rows of K features to N outputs."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """M rows, K features, N outputs. An op without a Linear layer leaves N aside."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        return "x".join(str(size) for size in self)


LLAMA = (
    Shape(8192, 4096, 4096),
    Shape(8192, 4096, 12288),
    Shape(8192, 2048, 2048),
    Shape(16384, 1024, 1024),
)
SETS: dict[str, tuple[Shape, ...]] = {
    # Puzzle 22: 4 sequences of 4 tokens.
    "puzzle": (Shape(16, 8, 16),),
    "small": (
        Shape(64, 1024, 1024),
        Shape(512, 1024, 1024),
        Shape(2048, 768, 3072),
        Shape(4096, 1024, 1024),
    ),
    # Attention and feed-forward entries of GPT-2 on one sequence, and on a batch of sixteen.
    "gpt2": (Shape(1024, 768, 2304), Shape(1024, 768, 3072), Shape(16384, 768, 2304)),
    # Five that projections of language models have, small to large.
    "named": (*LLAMA, Shape(16384, 768, 2304)),
    "llama": LLAMA,
    # ViT-B/16 and ViT-L/16: 197 tokens an image, batches of 8 and 32.
    "vit": (Shape(1576, 768, 2304), Shape(1576, 768, 3072), Shape(6304, 1024, 4096)),
    "decode": tuple(Shape(rows, 4096, 4096) for rows in (1, 4, 16, 64)),
    # Nothing divides: vectors, tiles and cache lines all end in the middle.
    "odd": (Shape(37, 50, 65), Shape(1, 1023, 7), Shape(199, 769, 97), Shape(1021, 1001, 509)),
    # For the LayerNorms alone: from many short rows to few long ones.
    "rows": (
        Shape(65536, 256, 256),
        Shape(16384, 1024, 1024),
        Shape(8192, 4096, 4096),
        Shape(256, 65536, 1),
    ),
}


def parse(text: str) -> Shape:
    """Return the shape that `M,K,N` names.

    Args:
        text: Three sizes of at least 1 between commas.

    Raises:
        ValueError: If it is something else.
    """
    sizes = [int(size) for size in text.split(",")]
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(f"a shape is M,K,N with sizes of at least 1, got {text!r}")
    return Shape(*sizes)
