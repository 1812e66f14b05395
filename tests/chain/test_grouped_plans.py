"""What is planned for several Linear layers on an H100, as any machine can say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mojo_programs import h100_costs, needs_mojo, printed

from fused_norm.call import record

# M, K, three N and a pitch, and what is planned: all products in one launch, dx in one, the
# strategy of the forward, launched, and where a fold may be kept. By what was measured on an H100.
PLANS = {
    (8192, 4096, 4096, 1024, 1024, 0): (True, True, record.DECLINED, record.KEPT_FOLD),
    (16384, 1024, 1024, 1024, 1024, 0): (True, True, record.DECLINED, record.KEPT_FOLD),
    # Sums so long that cuBLAS, tile by tile, is ahead by more than another pass over dx takes.
    (8192, 2048, 8192, 8192, 0, 16384): (True, False, record.DECLINED, record.DECLINED),
    (8448, 1024, 1000, 264, 0, 1264): (True, True, record.NEW_FOLD, record.KEPT_FOLD),
    # Very few rows, for which there is a kernel of its own.
    (16, 4096, 4096, 1024, 1024, 0): (True, False, record.DECLINED, record.KEPT_FOLD),
    # Few rows, few tiles, a length and a pitch that TMA cannot step over, and one layer alone.
    (64, 4096, 4096, 1024, 1024, 0): (False, False, record.DECLINED, record.DECLINED),
    (300, 200, 136, 64, 8, 0): (False, False, record.DECLINED, record.DECLINED),
    (8192, 4096, 4096, 1020, 1024, 0): (False, False, record.DECLINED, record.DECLINED),
    (8192, 4096, 4096, 1024, 1024, 6147): (False, False, record.DECLINED, record.DECLINED),
    (8192, 4096, 4096, 0, 0, 0): (False, False, record.DECLINED, record.DECLINED),
}


def places(sizes: list[int], step: int) -> str:
    """Return the part and the place there of each tile: each part begins with one of its own."""
    counts = [-(-size // step) for size in sizes]
    return " ".join(f"{part}:{i}" for part, count in enumerate(counts) for i in range(count))


@needs_mojo
def test_plan_and_the_walk_through_parts(tmp_path: Path) -> None:
    lines = iter(printed("sm90_grouped", h100_costs(tmp_path, "bfloat16"), PLANS))
    for case, (products, gradients, launched, kept) in PLANS.items():
        found = list(map(int, next(lines).split()))
        sizes = [n for n in case[2:5] if n]
        tiles, blocks = ([-(-n // step) for n in sizes] for step in (128, 64))
        assert found[:4] == [products, products, False, gradients], case
        assert found[4:6] == [launched, kept], case
        # A bias that is not aligned to 16 bytes cannot be copied to shared memory.
        assert found[6:] == [False, sum(tiles), sum(blocks)], case
        assert next(lines).strip() == places(sizes, 128)
        assert next(lines).strip() == places(sizes, 64)


MEASURED = json.loads(
    (
        Path(__file__).resolve().parents[2] / "benchmarks/results/h100-backward-products.json"
    ).read_text()
)
# No strategy that is planned may have taken so much more than the other.
MOST_REGRET = 1.09


def assert_little_regret(ours: bool, of_ours: float, of_pytorch: float, case: object) -> None:
    taken = of_ours if ours else of_pytorch
    assert taken <= MOST_REGRET * min(of_ours, of_pytorch), case


@needs_mojo
def test_sums_over_layers_go_by_what_was_measured(tmp_path: Path) -> None:
    cases = MEASURED["groups"]
    sizes = [(c["M"], c["K"], *c["N"], *[0] * (3 - len(c["N"])), sum(c["N"])) for c in cases]
    lines = printed("sm90_grouped", h100_costs(tmp_path, "bfloat16"), sizes)
    plans = [bool(int(line.split()[3])) for line in lines[::3]]
    assert len(set(plans)) == 2
    for case, ours in zip(cases, plans, strict=True):
        assert_little_regret(ours, case["us"]["ours"], case["us"]["pytorch"], case)


@needs_mojo
def test_gradients_of_weights_go_by_what_was_measured(tmp_path: Path) -> None:
    cases = MEASURED["layers"]
    sizes = [(c["M"], c["K"], c["N"]) for c in cases]
    lines = printed("sm90_backward", h100_costs(tmp_path, "bfloat16"), sizes)
    chosen = Counter[str]()
    for case, line in zip(cases, lines, strict=True):
        for suffix, ours in zip(("", ", db"), line.split()[:2], strict=True):
            chosen[suffix + ours] += 1
            us = (case["us"][strategy + suffix] for strategy in ("ours", "pytorch"))
            assert_little_regret(ours == "1", *us, case)
    # Alone, dW is always PyTorch's.
    assert set(chosen) == {"0", ", db0", ", db1"}


# M, K, N, and microseconds of a backward in a graph on an H200: with our products, and eager.
FEW = {
    (63, 360, 14336): (39.9, 30.4),
    (4, 1368, 12048): (43.9, 47.9),
    (1, 8192, 9392): (99.4, 182.8),
    (14, 2048, 1112): (14.4, 18.0),
    (11, 14336, 2560): (66.6, 78.9),
}


@needs_mojo
def test_few_rows_go_by_what_was_measured(tmp_path: Path) -> None:
    lines = printed("sm90_backward", h100_costs(tmp_path, "bfloat16"), FEW)
    for (size, (ours, eager)), line in zip(FEW.items(), lines, strict=True):
        assert bool(int(line.split()[4])) == (ours < eager), size


# M, K, N, and microseconds of dz, the norm's gradient and dW on an H200, without db: in our
# kernels, and in PyTorch's products and a pass of ours at the memory's speed.
WIDE = {
    (8192, 4096, 4096): (840, 880),
    (8192, 4096, 6144): (1232, 1280),
    (8192, 4096, 12288): (2435, 2424),
    (8192, 4096, 16384): (3333, 3257),
    (8192, 4096, 28672): (5758, 5640),
    (4096, 4096, 28672): (2885, 2822),
    (16384, 4096, 28672): (11531, 11286),
    (8192, 2048, 16384): (1646, 1605),
    (16384, 2048, 28672): (5742, 5627),
    (8192, 5120, 27648): (6901, 6799),
    (8192, 8192, 28672): (11436, 11253),
    (8192, 3072, 16384): (2507, 2444),
}


@needs_mojo
def test_wide_layers_go_by_what_was_measured(tmp_path: Path) -> None:
    lines = printed("sm90_backward", h100_costs(tmp_path, "bfloat16"), WIDE)
    for (size, (ours, others)), line in zip(WIDE.items(), lines, strict=True):
        is_left, is_left_with_db = map(int, line.split()[2:4])
        assert (others if is_left else ours) <= 1.005 * min(ours, others), size
        assert not is_left_with_db
