"""Warpgroup matrix multiply: accumulators as a register pack, one k block a call.

The accumulators are tied inputs and outputs of one assembly statement for a
whole k block, so that nothing can be placed between its instructions and the
compiler has no reason to move a register.
"""

from std.collections.string.string_span import (
    _get_kgen_string,
    get_static_string,
)
from std.sys import _RegisterPackType, inlined_assembly, size_of

from .eight_bits import is_eight_bits, right_type

comptime Accumulator[count: Int] = _RegisterPackType[
    *TypeList.splat[Trait=TrivialRegisterPassable, count=count, type=Float32]()
]
"""Float32 registers of one thread that tensor cores accumulate into.

Parameters:
    count: How many.
"""

comptime ROW_BYTES = 128
"""Bytes of a swizzled row: those of K in one block, or of c in one box."""

comptime K_BLOCK = ROW_BYTES // 2
"""Elements of K in one block, of 16 bits each."""

comptime SLICE_BYTES = 64 * ROW_BYTES
"""Bytes of 64 rows of an operand's k block, however they are stored."""

# Rows of 128 bytes in groups of eight, 1024 bytes from group to group, 128-byte
# swizzle. The rows run along K or, in a transposed operand, down K; then 64
# elements across K fill a row, and the next 64 are a whole slice further. That
# leading offset has no meaning otherwise.
comptime _DESCRIPTOR_HIGH = (1 << 30) | (1024 >> 4)


def row_elements[dtype: DType]() -> Int:
    """Counts the elements of a swizzled row.

    Parameters:
        dtype: Their type.

    Returns:
        The elements.
    """
    return ROW_BYTES // size_of[dtype]()


@always_inline
def operand_descriptor[transposed: Bool](address: UInt32) -> UInt32:
    """Encodes the low half of an operand's descriptor.

    Parameters:
        transposed: Whether the rows of the tile run down K.

    Args:
        address: Shared address of a tile, a multiple of 1024.

    Returns:
        The low 32 bits; advancing the tile by b bytes adds b / 16.
    """
    comptime leading = SLICE_BYTES >> 4 if transposed else 1
    # Above its 18 bits, an address in a cluster holds the rank of the block.
    return ((address & 0x3FFFF) >> 4) | UInt32(leading << 16)


comptime _STEP_BYTES = 32


def _step(transposed: Bool) -> Int:
    # From one product to the next, 16 elements of K further; or 8 of 32 bits, or 32 of 8.
    return (16 * ROW_BYTES if transposed else _STEP_BYTES) >> 4


def _list(prefix: String, first: Int, count: Int) -> String:
    var text = String()
    for i in range(count):
        if i > 0:
            text += ", "
        text += prefix + String(first + i)
    return text


def _name[dtype: DType]() -> String:
    """Names a type as the instruction does."""
    comptime if dtype == DType.float32:
        return "tf32"
    elif dtype == DType.bfloat16:
        return "bf16"
    elif dtype == DType.float16:
        return "f16"
    elif dtype == DType.float8_e4m3fn:
        return "e4m3"
    else:
        return "e5m2"


def _multiply_text[
    dtype: DType, right: DType
](
    n: Int, halves: Int, a_transposed: Bool, b_transposed: Bool, tied: Bool
) -> String:
    var count = n // 2 * halves
    # Operands: outputs, tied inputs, then the descriptors' low halves.
    var first = 2 * count if tied else count
    comptime transposes = dtype != DType.float32 and not is_eight_bits[dtype]()
    var kind = String("k", 16 * 2 // size_of[dtype](), ".f32.")
    kind += String(_name[dtype](), ".", _name[right]())
    var text = String("{\n.reg .b64 a, b;\nwgmma.fence.sync.aligned;\n")
    for step in range(ROW_BYTES // _STEP_BYTES):
        text += String(
            "{\n.reg .b32 u, v;\nadd.u32 u, $",
            first,
            ", ",
            _step(a_transposed) * step,
            ";\nadd.u32 v, $",
            first + 1,
            ", ",
            _step(b_transposed) * step,
            ";\nmov.b64 a, {u, ",
            _DESCRIPTOR_HIGH,
            "};\nmov.b64 b, {v, ",
            _DESCRIPTOR_HIGH,
            "};\n}\n",
        )
        for half in range(halves):
            if half > 0:
                text += String("add.s64 a, a, ", SLICE_BYTES >> 4, ";\n")
            text += String("wgmma.mma_async.sync.aligned.m64n", n, kind, " {")
            text += _list("$", half * (n // 2), n // 2)
            text += String("}, a, b, ", 1 if tied or step > 0 else 0, ", 1, 1")
            comptime if transposes:
                text += String(", ", Int(a_transposed), ", ", Int(b_transposed))
            text += ";\n"
    text += "wgmma.commit_group.sync.aligned;\n}"
    return text


def _constraints(count: Int, tied: Bool, tail: String) -> String:
    var text = String()
    for i in range(count):
        text += "=f" if i == 0 else ",=f"
    if tied:
        for i in range(count):
            text += String(",", i)
    return text + tail


@always_inline
def multiply_first[
    dtype: DType,
    n: Int,
    halves: Int,
    a_transposed: Bool,
    b_transposed: Bool,
    right: DType = right_type[dtype](),
](a: UInt32, b: UInt32) -> Accumulator[n // 2 * halves]:
    """Starts the product of the first k block, as one group.

    Parameters:
        dtype: Type of the operands: bfloat16, float16, or float32 as tf32; or that of the left one, of 8 bits.
        n: Columns of the product.
        halves: How many times 64 rows of the left operand are multiplied, 1 or 2.
        a_transposed: Whether the rows of the left operand's tile run down K.
        b_transposed: Whether the rows of the right operand's tile run down K.
        right: Type of the right operand.

    Args:
        a: Descriptor of the left operand, 64 rows of a k block; the next 64
            follow.
        b: Descriptor of the right operand, n rows of a k block.

    Returns:
        The accumulators, defined once the group is complete.
    """
    comptime text = get_static_string[
        _multiply_text[dtype, right](
            n, halves, a_transposed, b_transposed, False
        )
    ]()
    comptime constraints = get_static_string[
        _constraints(n // 2 * halves, False, ",r,r,~{memory}")
    ]()
    return __mlir_op.`pop.inline_asm`[
        _type=Accumulator[n // 2 * halves],
        assembly=_get_kgen_string[text](),
        constraints=_get_kgen_string[constraints](),
        hasSideEffects=True.__mlir_i1__(),
        isStackAligned=False.__mlir_i1__(),
    ](a, b)


@always_inline
def multiply_next[
    dtype: DType,
    n: Int,
    halves: Int,
    a_transposed: Bool,
    b_transposed: Bool,
    right: DType = right_type[dtype](),
](
    accumulator: Accumulator[n // 2 * halves], a: UInt32, b: UInt32
) -> Accumulator[n // 2 * halves]:
    """Starts adding the product of one more k block, as one group.

    Parameters:
        dtype: Type of the operands: bfloat16, float16, or float32 as tf32; or that of the left one, of 8 bits.
        n: Columns of the product.
        halves: How many times 64 rows of the left operand are multiplied, 1 or 2.
        a_transposed: Whether the rows of the left operand's tile run down K.
        b_transposed: Whether the rows of the right operand's tile run down K.
        right: Type of the right operand.

    Args:
        accumulator: What the product is added to.
        a: Descriptor of the left operand, 64 rows of a k block; the next 64
            follow.
        b: Descriptor of the right operand, n rows of a k block.

    Returns:
        The accumulators, defined once the group is complete.
    """
    comptime text = get_static_string[
        _multiply_text[dtype, right](
            n, halves, a_transposed, b_transposed, True
        )
    ]()
    comptime constraints = get_static_string[
        _constraints(n // 2 * halves, True, ",r,r,~{memory}")
    ]()
    return __mlir_op.`pop.inline_asm`[
        _type=Accumulator[n // 2 * halves],
        assembly=_get_kgen_string[text](),
        constraints=_get_kgen_string[constraints](),
        hasSideEffects=True.__mlir_i1__(),
        isStackAligned=False.__mlir_i1__(),
    ](accumulator, a, b)


@always_inline
def wait_previous():
    """Waits until every group but the last one started is complete."""
    inlined_assembly[
        "wgmma.wait_group.sync.aligned 1;",
        NoneType,
        constraints="~{memory}",
    ]()


@always_inline
def wait_all[count: Int](accumulator: Accumulator[count]) -> Accumulator[count]:
    """Waits until every started group is complete.

    Parameters:
        count: Registers of the accumulator.

    Args:
        accumulator: Registers the groups write, so that no use of them can be
            moved before the wait.

    Returns:
        The same registers.
    """
    comptime constraints = get_static_string[
        _constraints(count, True, ",~{memory}")
    ]()
    return __mlir_op.`pop.inline_asm`[
        _type=Accumulator[count],
        assembly=_get_kgen_string["wgmma.wait_group.sync.aligned 0;"](),
        constraints=_get_kgen_string[constraints](),
        hasSideEffects=True.__mlir_i1__(),
        isStackAligned=False.__mlir_i1__(),
    ](accumulator)
