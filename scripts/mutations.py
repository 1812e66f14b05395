"""Small wrong edits to the library, each of which its tests must notice."""

from __future__ import annotations

from dataclasses import dataclass

CPU = "op/norm_linear/cpu"
GEMM_CPU = "op/gemm/cpu"
GEMM_SM90 = "op/gemm/sm90"
SM90 = "op/norm_linear/sm90"


@dataclass(frozen=True)
class Mutation:
    """A wrong edit.

    Attributes:
        name: What is wrong, in words.
        target: `cpu`, or `gpu` where only one shows it.
        file: The file, from the root of the repository.
        old: Text that occurs once in it.
        new: What takes its place.
        tests: Arguments of pytest, of which one test at least must fail.
    """

    name: str
    target: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LINEAR = ("tests/test_layernorm_linear.py", "-k", "test_values_and_gradients and float32")
MISSING = ("tests/test_layernorm_linear.py", "-k", "test_missing_parameters")
ROWS = ("tests/ops/test_row_ops.py", "-k", "float32")
FAMILY = ("tests/ops/test_family.py", "-k", "test_values_and_gradients and float32")
HOPPER = (
    "tests/op/norm_linear/test_sm90.py",
    "tests/op/norm_linear/test_sm90_shapes.py",
    "-k",
    "bfloat16 and not spills",
)
ROWS_PASSED = (
    "tests/chain/test_linear.py",
    "-k",
    "test_values_and_gradients and bfloat16 and gate",
)
RESIDUAL = ("tests/ops/test_fp8_residual_hopper.py", "-k", "test_bits")
ADDED = ("tests/chain/test_linear_add.py", "-k", "product_adds_on_hopper and bfloat16")
LATE_RESIDUAL = ("tests/ops/test_fp8_residual_hopper.py", "-k", "kernel_before or just_before")
BOUNDS = ("tests/ops/test_fp8_gate_bound.py", "-k", "bound_is_near")
GATE_AGAIN = ("tests/ops/test_fp8_gate_bound.py", "-k", "quantized_again")
COLUMNS = ("tests/ops/test_fp8_gate_columns.py", "-k", "recipes or of_two_layers")
COLUMNS_REFUSED = ("tests/ops/test_fp8_gate_columns_decided.py", "-k", "no_use")
COLUMNS_SHARED = ("tests/ops/test_fp8_gate_columns_kept.py", "-k", "second_weight or stale")
GATED_BITS = ("tests/ops/test_fp8_bound_hopper.py", "-k", "test_bits and reglu")
STORED = ("tests/ops/test_fp8_store_hopper.py", "-k", "exceeds or earlier")
REACHING = ("tests/chain/test_linear.py", "-k", "test_gradient_of_the_sum_in_the_product")
WAITING = ("tests/chain/test_linear.py", "-k", "test_a_product_waits_for_the_rows_of_a_pass")
GROUPED = ("tests/chain/test_grouped.py", "-k", "test_values_and_gradients and bfloat16")
# In float16, which is not folded.
GROUPED_HALF = ("tests/chain/test_grouped.py", "-k", "test_values_and_gradients and float16")
BOTH_NORMS = ("tests/op/norm_linear/test_sm90_backward.py", "-k", "both_norms and rms_norm")
PASSED_ROWS = (
    "tests/op/norm_linear/test_sm90_backward.py",
    "-k",
    "test_gradients and (8200 or 5000)",
)
ROTARY = ("tests/ops/test_rotary.py", "-k", "values_and_gradients and float32 or each_row")
TILES = ("tests/op/norm_linear/test_tiles.py", "-k", "edge or nan or same_bits")
MAGNITUDES = (
    "tests/op/passes/test_passes.py",
    "-k",
    "(magnitude and float32) or (infinite and float32)",
)
GPU_LAYERNORM = ("tests/op/norm_linear/test_norm_linear_gpu.py", "-k", "bfloat16")

# The extensions that some tests need, for building them ahead: name, dtype, and folder where it is
# not the package's.
_PRODUCT = ("norm_linear_sm90", "bfloat16")
_ENTRIES = ("sm90_entries", "bfloat16", "tests/mojo")
_EIGHT_BITS = ("fp8_sm90", "bfloat16")
KERNELS: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    HOPPER: (_PRODUCT, _ENTRIES),
    PASSED_ROWS: (_PRODUCT, _ENTRIES),
    GROUPED: (_PRODUCT,),
    GROUPED_HALF: (("norm_linear_sm90", "float16"),),
    BOTH_NORMS: (("norm_linear_sm90", "float16"),),
    ROWS_PASSED: (_PRODUCT,),
    WAITING: (_PRODUCT,),
    REACHING: (_PRODUCT,),
    GPU_LAYERNORM: (("passes_gpu", "bfloat16"),),
    RESIDUAL: (_EIGHT_BITS,),
    ADDED: (_PRODUCT,),
    LATE_RESIDUAL: (_EIGHT_BITS,),
    GATED_BITS: (_EIGHT_BITS,),
    STORED: (_EIGHT_BITS,),
}

MUTATIONS = (
    Mutation(
        "no linear bias",
        "cpu",
        f"{CPU}/forward_job.mojo",
        "if call.bias\n                != 0 else 0,",
        "if call.bias\n                == 1 else 0,",
        LINEAR,
    ),
    Mutation(
        "no bias in the last vector of columns",
        "cpu",
        f"{CPU}/parameters.mojo",
        "var left = max(count - k, 0)",
        "var left = 0 if padded and count - k <= B.width else count - k",
        LINEAR,
    ),
    Mutation(
        "no eps",
        "cpu",
        f"{CPU}/statistics.mojo",
        "sqrt(variance + eps.cast[B.accum]())",
        "sqrt(variance)",
        ("tests/test_layernorm_linear.py", "-k", "test_eps or test_constant_rows"),
    ),
    Mutation(
        "lanes beyond the row take part in its variance",
        "cpu",
        f"{CPU}/statistics.mojo",
        "return lanes_below[B.width](count).select(\n"
        "        deviation, SIMD[B.accum, B.width](0)\n    )",
        "return deviation",
        LINEAR,
    ),
    Mutation(
        "no mean of h in dx (c1)",
        "cpu",
        "op/norms/layer_norm.mojo",
        "rstd * (g - c0 - xhat * c1)",
        "rstd * (g - xhat * c1)",
        LINEAR,
    ),
    Mutation(
        "no mean of h x_hat in dx (c2)",
        "cpu",
        "op/norms/layer_norm.mojo",
        "rstd * (g - c0 - xhat * c1)",
        "rstd * (g - c0)",
        LINEAR,
    ),
    Mutation(
        "no beta in dW",
        "cpu",
        f"{CPU}/parameter_gradients.mojo",
        "g.fma(gamma, beta * db)",
        "(g * gamma)",
        LINEAR,
    ),
    Mutation(
        "dbeta forgets all rows of W but the last",
        "cpu",
        f"{CPU}/parameter_gradients.mojo",
        "beta_sum = w.fma(Lanes(db.cast[B.accum]()), beta_sum)",
        "beta_sum = w * Lanes(db.cast[B.accum]())",
        LINEAR,
    ),
    Mutation(
        "every sixteenth row is left out of db",
        "cpu",
        f"{CPU}/parameter_gradients.mojo",
        "        var line = Matrix[dtype](call.dy, call.N)",
        "        if row % 16 == 15:\n            continue\n"
        "        var line = Matrix[dtype](call.dy, call.N)",
        LINEAR,
    ),
    Mutation(
        "the last partial sum is left out",
        "cpu",
        f"{CPU}/parameter_gradients.mojo",
        "for chunk in range(ceildiv(call.N, SUM_ROWS)):",
        "for chunk in range(ceildiv(call.N, SUM_ROWS) - 1):",
        LINEAR,
    ),
    Mutation(
        "a slab is a row short",
        "cpu",
        f"{CPU}/forward.mojo",
        "var count = plan.slabs.first(slab + 1) - first",
        "var count = plan.slabs.first(slab + 1) - first - 1",
        LINEAR,
    ),
    Mutation(
        "a product adds to what was in memory",
        "cpu",
        f"{GEMM_CPU}/product.mojo",
        "            k > 0,\n",
        "            True,\n",
        LINEAR,
    ),
    Mutation(
        "gamma is 0 where it is missing",
        "cpu",
        f"{CPU}/job.mojo",
        "default=1",
        "default=0",
        MISSING,
    ),
    Mutation(
        "RMSNorm's gradient takes the mean of g off",
        "cpu",
        "op/rows/programs/norm.mojo",
        "            _mean(row, total[0] * row.inverse_n),\n",
        "            total[0] * row.inverse_n,\n",
        FAMILY,
    ),
    Mutation(
        "no beta in the gradient of a scale",
        "cpu",
        "op/passes/modulation.mojo",
        "dG * g + dT * b)",
        "dG * g)",
        FAMILY,
    ),
    Mutation(
        "an activation's slope without its second term",
        "cpu",
        "op/gemm/activation.mojo",
        "self.dh = da * fma(h * s.share * s.rest, slope, s.share)",
        "self.dh = da * s.share",
        FAMILY,
    ),
    Mutation(
        "the gradient that reaches the sum is lost",
        "cpu",
        "fused_norm/chain/backward.h",
        "if (spec.returns_sum) dsum_ = grads[outputs++];",
        "if (spec.returns_sum) outputs++;",
        FAMILY,
    ),
    Mutation(
        "a residual is not part of what CPUs normalize",
        "cpu",
        f"{CPU}/normalize.mojo",
        "return call.sum if call.residual != 0 else call.x",
        "return call.x",
        FAMILY,
    ),
    Mutation(
        "statistics of another norm are taken",
        "cpu",
        "fused_norm/ops/family.py",
        "if (of, found_with) != (normalization, exact):",
        "if False:",
        ("tests/ops/test_family.py", "-k", "test_linear_add"),
    ),
    Mutation(
        "rows that no part has",
        "cpu",
        "op/rows/cpu.mojo",
        "return {operands, part_rows, ceildiv(rows, part_rows), no_sums}",
        "return {operands, part_rows, max(1, rows // part_rows), no_sums}",
        ROWS,
    ),
    Mutation(
        "wrong sign in the gradient of a LayerNorm with a trained eps",
        "cpu",
        "op/rows/programs/trainable_eps.mojo",
        "            -slope * inverse,\n",
        "            slope * inverse,\n",
        ROWS,
    ),
    Mutation(
        "a mean of a row's first elements is taken for that of the row",
        "cpu",
        "op/rows/programs/trainable_eps.mojo",
        "var rest_v = total[1] * row.inverse_n",
        "var rest_v = Scalar[dtype](0)",
        ("tests/op/rows/test_row_kernels.py", "-k", "first_elements"),
    ),
    Mutation(
        "a graph on a CPU does not wait for sums over no rows",
        "cpu",
        "op/max/checks.mojo",
        'comptime if target == "cpu":',
        'comptime if target == "none":',
        ("tests/graphs/test_max_ops.py", "-k", "test_no_rows"),
    ),
    Mutation(
        "a child of fork waits for threads that it has not",
        "cpu",
        "fused_norm/chain/kernels.h",
        "if (!forked) check(torch_get_num_threads(&count)",
        "check(torch_get_num_threads(&count)",
        ("tests/native/test_native.py", "-k", "test_works_after_fork"),
    ),
    Mutation(
        "negative views are read as they are in memory",
        "cpu",
        "fused_norm/call/memory.py",
        "if any(t is not None and (t.is_neg() or t._is_zerotensor()) for t in tensors):",
        "if False:",
        ("tests/reliability/test_bad_input.py", "-k", "negative"),
    ),
    Mutation(
        "a damaged build is loaded",
        "cpu",
        "fused_norm/native/cache.py",
        'return _read(path.with_suffix(".sha256")) == _digest(path).encode()',
        "return path.is_file()",
        ("tests/native/test_native.py", "-k", "damage"),
    ),
    Mutation(
        "tiles leave out the products after the last whole step",
        "cpu",
        f"{CPU}/forward_tiles.mojo",
        "    if whole < end:",
        "    if whole == 0:",
        TILES,
    ),
    Mutation(
        "sums on tiles restart after a block of products",
        "cpu",
        f"{GEMM_CPU}/tile_product.mojo",
        "            if accumulate:\n                load_tile",
        "            if accumulate and steps > 16:\n                load_tile",
        TILES,
    ),
    Mutation(
        "sums that wait get the bias of the next columns",
        "cpu",
        f"{CPU}/forward_tiles.mojo",
        "bias_turn = 1 - bias_turn",
        "bias_turn = 0",
        TILES,
    ),
    Mutation(
        "every block of rows of dW reads the first one's x_hat",
        "cpu",
        f"{CPU}/backward_many_rows.mojo",
        "block * plan.x_block + k",
        "0 * plan.x_block + k",
        TILES,
    ),
    Mutation(
        "a block of the weight is copied but for its last rows",
        "cpu",
        f"{CPU}/forward_tiles.mojo",
        "own.copy_block(weight.part(0, k), outputs, steps)",
        "own.copy_block(weight.part(0, k), min(outputs, 16), steps)",
        TILES,
    ),
    Mutation(
        "sums of y^T are brought into every second row of tiles from the first",
        "cpu",
        f"{CPU}/tile_columns.mojo",
        "m % TILES_ROWS\n",
        "0\n",
        TILES,
    ),
    Mutation(
        "an exponential too small for its type keeps its wrong bits",
        "cpu",
        "op/gemm/elementary.mojo",
        "return x.lt(Lanes(_LOWEST)).select(Lanes(0), power)",
        "return power",
        MAGNITUDES,
    ),
    Mutation(
        "tile registers are used whether Linux grants them or not",
        "cpu",
        "fused_norm/native/cpu_features.py",
        "return None if _permits_tiles() else",
        "return None if True else",
        ("tests/op/norm_linear/test_tiles.py", "-k", "permission"),
    ),
    Mutation(
        "no mean of dy gamma in dx (c1)",
        "gpu",
        "op/norms/layer_norm.mojo",
        "rstd * (g - c0 - xhat * c1)",
        "rstd * (g - xhat * c1)",
        GPU_LAYERNORM,
    ),
    Mutation(
        "no barrier between the parts of a block's sum and their reader",
        "gpu",
        "op/rows/gpu.mojo",
        "            barrier()\n            # each group of `warps` lanes",
        "            # each group of `warps` lanes",
        GPU_LAYERNORM,
    ),
    Mutation(
        "kernels on the default stream",
        "gpu",
        "fused_norm/chain/kernels.h",
        "question.stream = reinterpret_cast<int64_t>(stream);",
        "question.stream = 0;",
        ("tests/ops/test_registration.py", "-k", "TestStreams"),
    ),
    Mutation(
        "no linear bias in a fold",
        "gpu",
        f"{SM90}/fold_kernel.mojo",
        "        if has_bias != 0:\n            constant += (",
        "        if has_bias == 2:\n            constant += (",
        HOPPER,
    ),
    Mutation(
        "the first part of a long row is not folded",
        "gpu",
        f"{SM90}/fold_kernel.mojo",
        "        if column < 0:\n",
        "        if column < LOADS * step:\n",
        HOPPER,
    ),
    Mutation(
        "a fold reads parameters that are still being written",
        "gpu",
        f"{SM90}/fold_kernel.mojo",
        "    pdl_wait()\n",
        "",
        HOPPER,
    ),
    Mutation(
        "few rows are read while the norm still writes them",
        "gpu",
        f"{GEMM_SM90}/few_rows/producer.mojo",
        "                if waits or product.a_is_new != 0:\n                    pdl_wait()\n",
        "",
        HOPPER,
    ),
    Mutation(
        "no mean in the epilogue",
        "gpu",
        "op/gemm/epilogues.mojo",
        "column_terms[1].fma(Some(-row_terms.offset), sums)",
        "column_terms[1].fma(Some(0), sums)",
        HOPPER,
    ),
    Mutation(
        "no wait for a slot to be filled",
        "gpu",
        f"{GEMM_SM90}/multiplier.mojo",
        "            mbarrier_wait(self.shared.full(at.slot), at.parity)\n"
        "            accumulator = multiply_next[",
        "            accumulator = multiply_next[",
        HOPPER,
    ),
    Mutation(
        "no wait for the epilogue's vectors",
        "gpu",
        f"{GEMM_SM90}/consumer.mojo",
        "mbarrier_wait(shared.vectors_full(tile), parity)",
        "pass",
        HOPPER,
    ),
    Mutation(
        "a consumer multiplies before it is its turn",
        "gpu",
        f"{GEMM_SM90}/multiplier.mojo",
        "        self._ping_pong_wait(waits)\n",
        "        pass\n",
        HOPPER,
    ),
    Mutation(
        "threads store a column beyond the last one",
        "gpu",
        f"{GEMM_SM90}/elements.mojo",
        "if column + lane + UInt32(first) < self.n:",
        "if column + lane + UInt32(first) <= self.n:",
        HOPPER,
    ),
    Mutation(
        "a bias ends at a multiple of 16 bytes",
        "gpu",
        f"{GEMM_SM90}/producer.mojo",
        "for at in range(elements, count):",
        "for at in range(count, count):",
        HOPPER,
    ),
    Mutation(
        "an output box is filled again before it has been read",
        "gpu",
        f"{GEMM_SM90}/boxes.mojo",
        "store_wait_read[Self._count - 1]()",
        "store_wait_read[Self._count]()",
        HOPPER,
    ),
    Mutation(
        "rows are passed before they have been stored",
        "gpu",
        f"{SM90}/row_pass.mojo",
        "await_counter(self.stored.unsafe_offset(Int(step)), tiles)",
        "pass",
        PASSED_ROWS,
    ),
    Mutation(
        "RMSNorm's row pass in float16 is LayerNorm's",
        "gpu",
        "fused_norm/native/norm_linear_sm90.mojo",
        "            backward[DTYPE, RmsNorm](launcher, call)",
        "            backward[DTYPE, LayerNorm](launcher, call)",
        BOTH_NORMS,
    ),
    Mutation(
        "a row beyond the last one in the sums over rows",
        "gpu",
        f"{SM90}/row_pass.mojo",
        "                    g = 0\n",
        "                    pass\n",
        PASSED_ROWS,
    ),
    Mutation(
        "a fold is kept of a parameter that is not frozen among others that are",
        "cpu",
        "fused_norm/call/frozen.py",
        "return all(key is None or key in self._memory for key in keys)",
        "return True",
        ("tests/test_freeze.py", "-k", "held_by"),
    ),
    Mutation(
        "a fold that a CUDA graph reads goes with the freezing",
        "gpu",
        "fused_norm/call/frozen.py",
        "if made.is_captured:",
        "if False:",
        ("tests/ops/test_folds.py",),
    ),
    Mutation(
        "tiles of the second of several weights begin where the first one's do",
        "cpu",
        f"{GEMM_SM90}/parts.mojo",
        "return UInt32(1), index - self.second",
        "return UInt32(1), index",
        ("tests/chain/test_grouped_plans.py", "-k", "walk"),
    ),
    Mutation(
        "every weight of one sum multiplies the gradient of the first output",
        "gpu",
        f"{GEMM_SM90}/producer.mojo",
        "a_map = part_of(a_maps, part)",
        "pass",
        GROUPED,
    ),
    Mutation(
        "a third output has the bias of the second",
        "gpu",
        "op/gemm/epilogues.mojo",
        "own = self.third",
        "own = self.second",
        GROUPED_HALF,
    ),
    Mutation(
        "a product without a bias adds one",
        "gpu",
        f"{GEMM_SM90}/producer.mojo",
        "store_shared_pair(place + UInt32(8 * at), 0)",
        "store_shared_pair(place + UInt32(8 * at), 1)",
        ROWS_PASSED,
    ),
    Mutation(
        "both halves of a gate's tile are of the first weight",
        "gpu",
        f"{GEMM_SM90}/producer.mojo",
        "part = rank\n",
        "part = 0\n",
        ROWS_PASSED,
    ),
    Mutation(
        "a product on a fold reads rows that a pass still writes",
        "gpu",
        f"{SM90}/statistics.mojo",
        "return call.residual != 0 or call.has_statistics != 0",
        "return False",
        WAITING,
    ),
    Mutation(
        "what else reaches the sum is left out where the product passes over rows",
        "gpu",
        f"{SM90}/row_pass.mojo",
        "dx += _to_float32(dsum[r])",
        "pass",
        REACHING,
    ),
    Mutation(
        "a residual in FP8 is read before it is there",
        "gpu",
        f"{GEMM_SM90}/multiplier.mojo",
        "            mbarrier_wait(self.shared.full(at.slot), at.parity)\n"
        "            found.used[slot] = at.slot",
        "            found.used[slot] = at.slot",
        RESIDUAL,
    ),
    Mutation(
        "the lower rows of a tile get the residual of the upper ones",
        "gpu",
        f"{GEMM_SM90}/multiplier.mojo",
        "box + UInt32(half * SLICE_BYTES)",
        "box",
        ADDED,
    ),
    Mutation(
        "few rows in FP8 get a residual that is still being written",
        "gpu",
        f"{GEMM_SM90}/few_rows/kernel.mojo",
        "            pdl_wait()\n            if rank == 0:",
        "            if rank == 0:",
        LATE_RESIDUAL,
    ),
    Mutation(
        "the bound of a gate leaves out how its two weights are aligned",
        "cpu",
        "fused_norm/ops/hidden_scale.py",
        "(size + (w.weight * v.weight).sum(-1).abs()) / 2",
        "size / 2",
        BOUNDS,
    ),
    Mutation(
        "the bound of a gate leaves out the bias of what it gates",
        "cpu",
        "fused_norm/ops/hidden_scale.py",
        "w.size * v.rest + v.size * w.rest",
        "v.size * w.rest",
        BOUNDS,
    ),
    Mutation(
        "a bound outlives the second of the weights that it is of",
        "cpu",
        "fused_norm/call/frozen.py",
        "len(made) == len(of) and all(map(operator.is_, made, of))",
        "made[:1] == of[:1]",
        GATE_AGAIN,
    ),
    Mutation(
        "a bias keeps its size where the column that it is added to is divided",
        "cpu",
        "fused_norm/ops/hidden_columns.py",
        "(scales, _divided(bias, columns))",
        "(scales, bias)",
        COLUMNS,
    ),
    Mutation(
        "columns of a gate's only weight are divided in the half that is activated",
        "cpu",
        "fused_norm/ops/hidden_scale.py",
        "(len(like) - len(self.factors), 0)",
        "(0, len(like) - len(self.factors))",
        COLUMNS,
    ),
    Mutation(
        "a second weight's columns are multiplied whatever it costs",
        "cpu",
        "fused_norm/ops/hidden_columns.py",
        "torch.cat(ratios).mean() <= _MOST_NOISE",
        "torch.cat(ratios).mean() > 0",
        COLUMNS_REFUSED,
    ),
    Mutation(
        "hidden columns are divided though one has all of the energy",
        "cpu",
        "fused_norm/ops/hidden_scale.py",
        "<= _MOST_OF_ONE * energy.sum()",
        "<= energy.sum()",
        COLUMNS_REFUSED,
    ),
    Mutation(
        "a second weight has the columns of another layer before it",
        "cpu",
        "fused_norm/ops/hidden_columns.py",
        "*cast, of.power_of_two, columns.content)",
        "*cast, of.power_of_two)",
        COLUMNS_SHARED,
    ),
    Mutation(
        "hidden rows in 8 bits are gates that gate themselves",
        "gpu",
        f"{GEMM_SM90}/store_quantized.mojo",
        "comptime gated = own_columns + column",
        "comptime gated = column",
        GATED_BITS,
    ),
    Mutation(
        "hidden rows of a gate in 8 bits are stored where its tiles have their columns",
        "gpu",
        f"{GEMM_SM90}/store_quantized.mojo",
        "Int32(first_column) + Int32(start))",
        "Int32(rows.column) + Int32(start))",
        GATED_BITS,
    ),
    Mutation(
        "columns past the last one have what an earlier tile left of a bias",
        "gpu",
        f"{GEMM_SM90}/store_quantized.mojo",
        "    _clear_vectors[columns, parts](rows, vectors)",
        "    pass",
        STORED,
    ),
    Mutation(
        "hidden rows in 8 bits saturate where they exceed a given scale",
        "gpu",
        f"{GEMM_SM90}/store_quantized.mojo",
        "            _overwrite(rows, box, scales)",
        "            pass",
        STORED,
    ),
    Mutation(
        "the gradient of a rotation is turned as the rotation is",
        "cpu",
        "op/rotary/cpu.mojo",
        ") - sines.turned(",
        ") + sines.turned(",
        ROTARY,
    ),
    Mutation(
        "no mean in the gradient of a head's norm",
        "cpu",
        "op/rotary/cpu.mojo",
        "((g - n * mean) * rstd)",
        "(g * rstd)",
        ROTARY,
    ),
    Mutation(
        "all rows are rotated as the first one is",
        "cpu",
        "op/rotary/pair.mojo",
        "row % call.positions * call.angles",
        "row * 0 * call.angles",
        ROTARY,
    ),
    Mutation(
        "elements that are not rotated are those of the wrong place",
        "cpu",
        "op/rotary/pair.mojo",
        "self.a = 2 * index * width",
        "self.a = index * width",
        ROTARY,
    ),
)
