"""What is planned for a Linear layer by itself on an H100, as any machine can say."""

from __future__ import annotations

from pathlib import Path

from mojo_programs import h100_costs, needs_mojo, printed

from fused_norm.call import record

# M, K, N: whether a product alone is ours, one that is activated, one that gates and keeps h, one
# that adds a residual, and dy weight; then dy weight that becomes the gradient of h, of a GELU, a
# gate and a ReLU. By what was measured on an H100.
PLANS = {
    (16384, 768, 2304): (True, True, True, True, True, True, True, False),
    # Both products take the same time within 1 %, and PyTorch's is taken.
    (16384, 4096, 12288): (True, True, True, True, False, True, True, False),
    (8192, 4096, 4096): (False, True, True, True, False, True, True, False),
    (16384, 1024, 1024): (True, True, True, True, True, True, True, False),
    # Rows of the last of 129 tiles are outside the matrix: one of several waves waits for them.
    (16448, 1024, 1024): (True, True, True, True, True, True, True, False),
    (1024, 4096, 4096): (False, True, True, True, False, True, True, False),
    # PyTorch's product of dy and the weight shares its long sums between tiles.
    (2048, 768, 3072): (True, True, True, True, False, False, False, False),
    # Few rows share no pass of their own; very few have a kernel that activates, and one that adds
    # as fast as PyTorch's product.
    (64, 4096, 4096): (True, False, False, False, True, False, False, False),
    (64, 4096, 12288): (False, False, False, False, True, False, False, False),
    (16, 4096, 12288): (True, True, True, True, True, False, False, False),
    # Sums of one k block.
    (16, 64, 4096): (True, False, False, False, False, False, False, False),
    # Tiles that leave much of the device idle.
    (512, 1024, 1024): (True, False, False, False, False, False, False, False),
    # The last box of a gate's h would reach into its other half. dy weight has sums too long.
    (8192, 1024, 4136): (True, True, False, True, False, True, True, False),
    # So would those of its gradients, of which h has 1016.
    (8192, 1016, 4096): (False, True, True, True, False, True, False, False),
    # Rows that are not aligned to 16 bytes.
    (8192, 1024, 1028): (False, False, False, False, False, False, False, False),
}


@needs_mojo
def test_plan(tmp_path: Path) -> None:
    lines = printed("sm90_linear", h100_costs(tmp_path, "bfloat16"), PLANS)
    for (case, expected), line in zip(PLANS.items(), lines, strict=True):
        *found, in_float32, activated, shifted, invariant, _, _ = map(int, line.split())
        assert tuple(map(bool, found)) == expected, case
        assert not in_float32
        assert activated == record.DECLINED
        # What boxes cannot begin at is left to PyTorch, and what may not be, never.
        assert not shifted
        assert invariant == (case[2] != 1028)


@needs_mojo
def test_no_kept_fold_activates(tmp_path: Path) -> None:
    """On an H100, blocks with such folds took up to 0.11 of eager more than without (LLaMA 8B)."""
    cases = [(8192, 4096, 14336), (16384, 1024, 3072), (8192, 1600, 6400), (16448, 1024, 4096)]
    lines = printed("sm90_linear", h100_costs(tmp_path, "bfloat16"), cases)
    for case, line in zip(cases, lines, strict=True):
        assert list(map(int, line.split()))[-2:] == [record.FUSED] * 2, case
