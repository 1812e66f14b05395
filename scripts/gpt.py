"""A small character-level GPT, and the text of this repository to train it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import fused_norm as fn

Entry = Callable[[int, int], nn.Module]
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its training."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    steps: int
    rate: float

    @property
    def tokens(self) -> int:
        """Characters that a step predicts."""
        return self.batch * self.context


SIZES = {
    "tiny": Size(2, 2, 32, 32, 8, 30, 3e-3),
    "small": Size(4, 4, 128, 128, 16, 500, 1e-3),
    "large": Size(12, 16, 2048, 1024, 32, 200, 2e-4),
}


def norm_linear(features: int, outputs: int) -> nn.Module:
    """Return PyTorch's modules for the pair."""
    return nn.Sequential(nn.LayerNorm(features), nn.Linear(features, outputs))


MODELS: dict[str, Entry] = {"eager": norm_linear, "fused": fn.LayerNormLinear}


class Block(nn.Module):
    """Attention and feed-forward, each entered by a LayerNorm and a Linear layer."""

    def __init__(self, size: Size, entry: Entry) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_in = entry(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.feed_in = entry(size.width, 4 * size.width)
        self.feed_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, context, width]` for an input of that shape."""
        q, k, v = self.attention_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(heads.transpose(1, 2).flatten(2)).to(x.dtype)
        y: Tensor = self.feed_out(nn.functional.gelu(self.feed_in(x))).to(x.dtype)
        return x + y


class GPT(nn.Module):
    """Predicts the next character. The residual stream has the dtype of the products."""

    def __init__(self, size: Size, vocabulary: int, dtype: torch.dtype, entry: Entry) -> None:
        super().__init__()
        self.dtype = dtype
        self.characters = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, entry) for _ in range(size.layers))
        self.head = entry(size.width, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss of predicting all but the first of `[batch, context + 1]`."""
        places = torch.arange(text.shape[1] - 1, device=text.device)
        x = (self.characters(text[:, :-1]) + self.positions(places)).to(self.dtype)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1).float(), text[:, 1:].flatten()
        )


def corpus() -> tuple[Tensor, int]:
    """Return the repository's text as numbers of characters, and how many characters there are."""
    folders = ("benchmarks", "docs", "fused_norm", "op", "scripts", "solutions", "tutorial")
    files = [*ROOT.glob("*.md"), ROOT / "LICENSE"]
    for folder in folders:
        files += [p for kind in ("md", "py", "mojo") for p in (ROOT / folder).rglob(f"*.{kind}")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


def batch(text: Tensor, size: Size, seed: int, step: int, rank: int, world: int) -> Tensor:
    """Return a process's share of a step's batch: it depends on these arguments alone."""
    # Of a seed, PyTorch's generator on the CPU has the lower 32 bits alone.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)
    starts = torch.randint(len(text) - size.context, (size.batch,), generator=generator)
    return torch.stack([text[i : i + size.context + 1] for i in starts[rank::world].tolist()])
