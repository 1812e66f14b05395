"""Edits that only tests on a GPU notice, and the kernels that these tests need."""

from __future__ import annotations

from mutations.mutation import Mutation

GEMM_SM90 = "op/gemm/sm90"
SM90 = "op/norm_linear/sm90"

HOPPER = (
    "tests/op/norm_linear/test_sm90.py",
    "tests/op/norm_linear/test_sm90_shapes.py",
    "-k",
    "bfloat16 and not spills",
)
ENTRIES = ("tests/op/norm_linear/test_sm90.py", "-k", "bfloat16 and not spills")
ROWS_PASSED = (
    "tests/chain/test_linear.py",
    "-k",
    "test_values_and_gradients and bfloat16 and gate",
)
RESIDUAL = ("tests/ops/test_fp8_residual_hopper.py", "-k", "test_bits")
ADDED = ("tests/chain/test_linear_add.py", "-k", "product_adds_on_hopper and bfloat16")
GATED_ADD = ("tests/chain/test_linear_gated_add.py", "-k", "one_product_on_hopper and bfloat16")
LEFT_GATES = ("tests/chain/test_linear_gated_add.py", "-k", "what_the_product_leaves")
LATE_RESIDUAL = ("tests/ops/test_fp8_residual_hopper.py", "-k", "kernel_before or just_before")
GATED_BITS = ("tests/ops/test_fp8_bound_hopper.py", "-k", "test_bits and reglu")
STORED = ("tests/ops/test_fp8_store_hopper.py", "-k", "exceeds or earlier")
OF_GRADIENTS = ("tests/ops/test_fp8_gradient_hopper.py", "-k", "swiglu or no_number")
WEIGHT_GRADIENTS = ("tests/ops/test_fp8_weight_gradient_hopper.py", "-k", "lose_more or of_layers")
STACKED_SUMS = ("tests/op/norm_linear/test_sm90_stacked.py", "-k", "test_values and bfloat16")
STACKED = ("tests/ops/test_fp8_weight_gradient_hopper.py", "-k", "layers_together")
STREAMED = ("tests/ops/test_fp8_norm_hopper.py", "-k", "test_values or just_before")
TOGETHER = ("tests/ops/test_fp8_together_hopper.py", "-k", "test_every_size")
IN_PARTS = ("tests/ops/test_fp8_parts_hopper.py", "-k", "test_among_others")
KEPT_MAXIMA = ("tests/ops/test_fp8_activations.py", "-k", "kernels_leave_maxima and gelu")
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
GPU_LAYERNORM = ("tests/op/norm_linear/test_norm_linear_gpu.py", "-k", "bfloat16")

# The extensions that some tests need, for building them ahead: name, dtype, and folder where it is
# not the package's.
_PRODUCT = ("norm_linear_sm90", "bfloat16")
_ENTRIES = ("sm90_entries", "bfloat16", "tests/mojo")
_EIGHT_BITS = ("fp8_sm90", "bfloat16")
KERNELS: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    HOPPER: (_PRODUCT, _ENTRIES),
    ENTRIES: (_PRODUCT, _ENTRIES),
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
    GATED_ADD: (_PRODUCT,),
    LEFT_GATES: (_PRODUCT,),
    LATE_RESIDUAL: (_EIGHT_BITS,),
    GATED_BITS: (_EIGHT_BITS,),
    STORED: (_EIGHT_BITS,),
    KEPT_MAXIMA: (_EIGHT_BITS,),
    OF_GRADIENTS: (_EIGHT_BITS,),
    WEIGHT_GRADIENTS: (_EIGHT_BITS,),
    TOGETHER: (_EIGHT_BITS,),
    IN_PARTS: (_EIGHT_BITS,),
    STACKED: (_EIGHT_BITS,),
    STACKED_SUMS: (_PRODUCT,),
    STREAMED: (_EIGHT_BITS,),
}

MUTATIONS = (
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
        ENTRIES,
    ),
    Mutation(
        "few rows are read while the norm still writes them",
        "gpu",
        f"{GEMM_SM90}/few_rows/producer.mojo",
        "                if waits or product.a_is_new != 0:\n                    pdl_wait()\n",
        "",
        ENTRIES,
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
        ENTRIES,
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
        "a fold that a CUDA graph reads goes with the freezing",
        "gpu",
        "fused_norm/call/frozen.py",
        "if made.is_captured:",
        "if False:",
        ("tests/ops/test_folds.py",),
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
        "all rows get the gate of the first group",
        "gpu",
        "op/gemm/gated_add.mojo",
        "var group = Int32(row) // self.rows",
        "var group = Int32(0)",
        GATED_ADD,
    ),
    Mutation(
        "gates are taken to be dense",
        "gpu",
        "fused_norm/chain/linear.h",
        "set_gate(call, address(gate), groups, pitch);",
        "set_gate(call, address(gate), groups, gate.size(-1));",
        GATED_ADD,
    ),
    Mutation(
        "a tile of rows of two groups has the gate of the first",
        "gpu",
        f"{SM90}/linear.mojo",
        "call.groups == 1 or call.M % (call.groups * TILE_ROWS) == 0",
        "call.groups != 0",
        LEFT_GATES,
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
        f"{GEMM_SM90}/clear_vectors.mojo",
        "    if used >= UInt32(of_c):",
        "    if used >= UInt32(0):",
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
        "an activation's maxima of columns are those of half of the rows",
        "gpu",
        f"{GEMM_SM90}/kept_maxima.mojo",
        "comptime distance = UInt32(16 >> level)",
        "comptime distance = UInt32(8 >> level)",
        KEPT_MAXIMA,
    ),
    Mutation(
        "maxima of a gradient count columns past the last one, which hold what a gate multiplies",
        "gpu",
        f"{GEMM_SM90}/store_gradients.mojo",
        "var counts = column + UInt32(group * 8) < n",
        "var counts = column < 2 * n",
        OF_GRADIENTS,
    ),
    Mutation(
        "gradients of two layers in 8 bits share their maxima",
        "gpu",
        "op/norm_linear/sm90/scaled_linear.mojo",
        "second_kept = call.workspace + 16 * ceildiv(count, 4)",
        "second_kept = call.workspace + 16 * ceildiv(0, count)",
        OF_GRADIENTS,
    ),
    Mutation(
        "tensor cores alone add up the gradient of a weight in 8 bits",
        "gpu",
        f"{GEMM_SM90}/multiplier.mojo",
        "var end = _PROMOTED // (1 + self.consumer)",
        "var end = max(_PROMOTED // (1 + self.consumer), blocks)",
        WEIGHT_GRADIENTS,
    ),
    Mutation(
        "the gradient of a weight in 8 bits is a product as any other",
        "gpu",
        "fused_norm/chain/eight_bits_products.h",
        "call.dweight = address(found[0]);",
        "call.y = address(found[0]);",
        WEIGHT_GRADIENTS,
    ),
    Mutation(
        "blocks of a matrix that is quantized with others begin with another's rows",
        "gpu",
        "op/passes/matrices.mojo",
        "                Int32(self.down),",
        "                Int32(self.down // 2 * 2),",
        TOGETHER,
    ),
    Mutation(
        "only the first of matrices has scales of its columns",
        "gpu",
        "op/passes/quantize_by_maxima.mojo",
        "if first_row == 0:",
        "if block_idx.y == 0:",
        TOGETHER,
    ),
    Mutation(
        "maxima of rows of a matrix in parts are where a whole one of a part's columns has them",
        "gpu",
        "op/passes/matrices.mojo",
        "Int32(whole - own.skipped)",
        "Int32(own.K)",
        IN_PARTS,
    ),
    Mutation(
        "rows are taken out of shared memory before they are there",
        "gpu",
        "op/rows/gpu_stream.mojo",
        "async_copy_wait_group(Int32(Self.slots - 1))",
        "async_copy_wait_group(Int32(Self.slots))",
        STREAMED,
    ),
    Mutation(
        "a layer's gradients of weights begin a row of tiles late where several are stacked",
        "gpu",
        f"{GEMM_SM90}/parts.mojo",
        "row >= end",
        "row > end",
        STACKED,
    ),
    Mutation(
        "biases of stacked layers all get the sums that are the first one's",
        "gpu",
        f"{GEMM_SM90}/consumer.mojo",
        "sums = product.row_sums[i]",
        "sums = product.row_sums[0]",
        STACKED_SUMS,
    ),
)
