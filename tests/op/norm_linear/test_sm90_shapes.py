"""The Hopper kernel in each of its shapes, with each epilogue, against float64."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from devices import ON_HOPPER
from kernel_harness import Guarded, address, extension
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    ON_HOPPER,
]
EPS = 1e-5
# A rounding to the type, and what activations are off by in their last bits.
BOUND = {torch.bfloat16: 2.5e-3, torch.float16: 6e-4}
# As the extension counts them.
KINDS = ["transposed", "bias", "gelu", "swiglu", "add", "scale", "gathered"]
# Those that have a bias, or none.
BARE = ["bias", "gelu", "swiglu", "add"]
GELU, SILU = 2, 5
# Columns of the tiles that plans choose from, and whether they are ping-pong. Narrower ones have
# no kernel with a gate, those after the common ones none that activates; one gathers statistics.
TILING = (Path(__file__).resolve().parents[3] / "op/gemm/sm90/tiling.mojo").read_text()
# The first list is of shapes that every product may have.
(LISTED,) = re.findall(r"^comptime SHAPES = \[\n(.*?)^\]", TILING, re.DOTALL | re.MULTILINE)
TILES = re.findall(r"Shape\((\d+), (True|False)", LISTED)
TILES = [(int(columns), turns == "True", 1) for columns, turns in TILES]
# Those that blocks of a cluster share, how many, of products with a bias or none.
FEW_TILES = (Path(__file__).resolve().parents[3] / "op/gemm/sm90/few_tiles.mojo").read_text()
(SPLIT,) = re.findall(r"^comptime SPLITS = \[(.*?)\]$", FEW_TILES, re.DOTALL | re.MULTILINE)
SPLITS = [(int(n), False, int(blocks)) for n, blocks in re.findall(r"Split\((\d+), (\d+)", SPLIT)]
COMMON = int(re.search(r"COMMON_SHAPES = (\d+)", TILING)[1])
NARROWEST_GATE = int(re.search(r"NARROWEST_GATE = (\d+)", TILING)[1])
GATHERING = [(256, False, 1)]
# One tile; less than one, in each size; one of the two consumers without a tile; two waves; more;
# tiles that follow each other faster than they are stored; one row of many tiles; K that is not a
# multiple of the k block.
SHAPES = [
    (256, 64, 128),
    (37, 72, 8),
    (128, 64, 2048),
    (4096, 1024, 1024),
    (1000, 776, 1032),
    (8192, 256, 2304),
    (3000, 2048, 4104),
    (37, 64, 65536),
    (16384, 64, 1024),
    (300, 1024, 16384),
]


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def kernels(request: pytest.FixtureRequest) -> tuple[ModuleType, torch.dtype]:
    return extension("sm90_shapes", request.param, "tests/mojo", gpu=True), request.param


# Columns whose rows TMA cannot store: less than a tile, many tiles, one column in the last.
ODD = [(37, 72, 7), (300, 520, 50257), (1000, 776, 1031), (128, 64, 129), (16384, 64, 1001)]


def test_every_shape_is_tried() -> None:
    assert len(TILES) == LISTED.count("    Shape(") > 2
    assert len(SPLITS) == SPLIT.count("Split(") > 1
    assert set(GATHERING) <= set(TILES)


@pytest.mark.parametrize("kind", ["bias", "bias-bare", "scale"])
@pytest.mark.parametrize("shape", ODD)
def test_any_columns(
    kernels: tuple[ModuleType, torch.dtype], shape: tuple[int, int, int], kind: str
) -> None:
    check_product(kernels, TILES[0], shape, kind)


@pytest.mark.parametrize("kind", KINDS + [f"{kind}-bare" for kind in BARE])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products(
    kernels: tuple[ModuleType, torch.dtype],
    tile: tuple[int, bool, int],
    shape: tuple[int, int, int],
    kind: str,
) -> None:
    if tile not in (GATHERING if kind == "gathered" else TILES):
        pytest.skip("no such kernel")
    activation = kind.removesuffix("-bare")
    if activation == "swiglu" and tile[0] < NARROWEST_GATE:
        pytest.skip("no such kernel")
    if activation in ("gelu", "swiglu") and tile not in TILES[:COMMON]:
        pytest.skip("no such kernel")
    check_product(kernels, tile, shape, kind)


@pytest.mark.parametrize("kind", ["bias", "bias-bare"])
@pytest.mark.parametrize("shape", [*SHAPES, (129, 640, 8), (300, 4104, 1000)])
@pytest.mark.parametrize("tile", SPLITS, ids=str)
def test_splits(
    kernels: tuple[ModuleType, torch.dtype],
    tile: tuple[int, bool, int],
    shape: tuple[int, int, int],
    kind: str,
) -> None:
    _, _, blocks = tile
    if shape[1] <= 64 * (blocks - 1):
        pytest.skip("a block would have nothing to multiply")
    check_product(kernels, tile, shape, kind)


def check_product(
    kernels: tuple[ModuleType, torch.dtype],
    tile: tuple[int, bool, int],
    shape: tuple[int, int, int],
    kind: str,
) -> None:
    module, dtype = kernels
    m, k, n = shape
    kind, is_bare = kind.removesuffix("-bare"), kind.endswith("-bare")
    if kind == "gathered" and k % 64:
        pytest.skip("the zeros that fill up a k block would change a variance")
    if kind == "swiglu" and n % 128:
        pytest.skip("boxes of a gate's h end where its halves do")

    def random(*sizes: int, scale: float = 1.0, around: float = 0.0, like: torch.dtype) -> Tensor:
        return (torch.randn(*sizes, device="cuda") * scale + around).to(like)

    x = random(m, k, around=1.0, like=dtype)
    w = random(n, k, scale=k**-0.5, like=dtype)
    bias, added = random(n, like=dtype), random(m, n, like=dtype)
    constants = random(n, like=torch.float32)
    corrections = w.double().sum(1).float()
    mean, rstd = (Guarded((m,), torch.float32, "cuda") for _ in range(2))
    wide = x.double()
    if kind == "scale":
        mean.tensor.copy_(torch.randn(m))
        rstd.tensor.copy_(torch.rand(m) + 0.5)
        true_mean, true_rstd = mean.tensor.double(), rstd.tensor.double()
    else:
        true_mean = wide.mean(1)
        true_rstd = (wide.var(1, unbiased=False) + EPS).rsqrt()

    scaled = kind in ("scale", "gathered")
    exact = wide @ w.double().t()
    if scaled:
        exact = true_rstd[:, None] * (exact - true_mean[:, None] * corrections.double())
        exact += constants.double()
    elif kind != "transposed" and not is_bare:
        exact += bias.double()
    if kind == "add":
        exact += added.double()
    gates, others = (_half(exact, i) if kind == "swiglu" else exact for i in range(2))
    activated: dict[str, Callable[[], Tensor]] = {
        "gelu": lambda: F.gelu(exact),
        "swiglu": lambda: F.silu(gates) * others,
    }
    truth = activated[kind]() if kind in activated else exact
    vector = constants if scaled else None if is_bare else bias
    own = module.new_launcher(0, torch.cuda.current_stream().cuda_stream, 1)
    b = w.t().contiguous() if kind == "transposed" else w
    results = []
    for stores_h, _ in itertools.product((False, True) if kind in activated else (False,), "12"):
        y = Guarded(tuple(truth.shape), dtype, "cuda")
        h = Guarded((m, n), dtype, "cuda")
        module.product(
            *(
                own,
                *tile,
                KINDS.index(kind),
                y.tensor.data_ptr(),
                x.data_ptr(),
                b.data_ptr(),
                m,
                n,
                k,
            ),
            *(address(vector), address(added), address(corrections)),
            *(address(mean.tensor), address(rstd.tensor), address(h.tensor) if stores_h else 0),
            SILU if kind == "swiglu" else GELU,
        )
        results.append(y.checked())
        assert error(y.tensor, truth) < BOUND[dtype]
        found = h.checked()
        if stores_h:
            halves = torch.cat([gates, others], 1) if kind == "swiglu" else exact
            assert error(found, halves) < BOUND[dtype]
        else:
            assert found.isnan().all()
    assert all(torch.equal(results[0], again) for again in results[1:])
    if kind == "gathered":
        assert torch.allclose(mean.checked().double(), true_mean, rtol=0, atol=3e-6)
        assert torch.allclose(rstd.checked().double(), true_rstd, rtol=3e-6, atol=0)


def error(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth).norm() / truth.norm()).item()


def _half(h: Tensor, i: int) -> Tensor:
    """Return the gates, or what they gate: of 16 columns, the first eight gate the others."""
    return h.view(len(h), -1, 2, 8)[:, :, i].reshape(len(h), -1)
