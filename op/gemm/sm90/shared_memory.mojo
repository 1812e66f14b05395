"""Loads and stores of shared memory, as functions of one instruction each.

Shared memory is given by 32-bit addresses, so that address arithmetic needs no 64-bit registers.
"""

from std.memory import bitcast
from std.sys import _RegisterPackType, inlined_assembly


@doc_hidden
@always_inline
def shared_value(address: UInt32) -> Float32:
    """Loads a value."""
    return inlined_assembly[
        "ld.shared.f32 $0, [$1];", Float32, constraints="=f,r,~{memory}"
    ](address)


@doc_hidden
@always_inline
def store_shared_value(address: UInt32, value: Float32):
    """Stores a value."""
    inlined_assembly[
        "st.shared.f32 [$0], $1;", NoneType, constraints="r,f,~{memory}"
    ](address, value)


@doc_hidden
@always_inline
def store_remote_value(address: UInt32, value: Float32):
    """Stores a value in any block of the cluster, by its address from `map_to_rank`."""
    inlined_assembly[
        "st.shared::cluster.f32 [$0], $1;",
        NoneType,
        constraints="r,f,~{memory}",
    ](address, value)


@doc_hidden
@always_inline
def shared_pair[
    dtype: DType = DType.float32
](address: UInt32) -> SIMD[DType.float32, 2]:
    """Loads two neighboring elements, from a multiple of their size together."""
    comptime if dtype == DType.float32:
        var pair = inlined_assembly[
            "ld.shared.v2.f32 {$0, $1}, [$2];",
            _RegisterPackType[Float32, Float32],
            constraints="=f,=f,r,~{memory}",
        ](address)
        return SIMD[DType.float32, 2](pair[0], pair[1])
    else:
        var word = inlined_assembly[
            "ld.shared.b32 $0, [$1];",
            UInt32,
            constraints="=r,r,~{memory}",
        ](address)
        return unpack_pair[dtype](word)


@doc_hidden
@always_inline
def store_shared_pair(address: UInt32, pair: SIMD[DType.float32, 2]):
    """Stores two neighboring values, to a multiple of 8."""
    inlined_assembly[
        "st.shared.v2.f32 [$0], {$1, $2};",
        NoneType,
        constraints="r,f,f,~{memory}",
    ](address, pair[0], pair[1])


@doc_hidden
@always_inline
def shared_eight[dtype: DType](address: UInt32) -> SIMD[DType.float32, 8]:
    """Loads eight neighboring elements of 16 bits, from a multiple of 16."""
    var words = inlined_assembly[
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,r,~{memory}",
    ](address)
    var pairs = SIMD[DType.uint32, 4](words[0], words[1], words[2], words[3])
    comptime if dtype == DType.bfloat16:
        # Either half is the upper half of a float32.
        return bitcast[DType.float32, 4](pairs << 16).interleave(
            bitcast[DType.float32, 4](pairs & 0xFFFF0000)
        )
    else:
        return bitcast[dtype, 8](pairs).cast[DType.float32]()


@doc_hidden
@always_inline
def shared_element[dtype: DType](address: UInt32) -> Scalar[dtype]:
    """Loads an element of 16 or 32 bits."""
    comptime if dtype == DType.float32:
        return rebind[Scalar[dtype]](shared_value(address))
    else:
        return bitcast[dtype, 1](
            inlined_assembly[
                "ld.shared.b16 $0, [$1];",
                UInt16,
                constraints="=h,r,~{memory}",
            ](address)
        )


@doc_hidden
@always_inline
def store_shared_element[dtype: DType](address: UInt32, element: Scalar[dtype]):
    """Stores an element of 16 or 32 bits."""
    comptime if dtype == DType.float32:
        store_shared_value(address, rebind[Float32](element))
    else:
        inlined_assembly[
            "st.shared.b16 [$0], $1;", NoneType, constraints="r,h,~{memory}"
        ](address, bitcast[DType.uint16, 1](element))


@doc_hidden
@always_inline
def pack_pair[dtype: DType](pair: SIMD[DType.float32, 2]) -> UInt32:
    """Rounds two values to 16 bits each, the first in the lower half."""
    comptime kind = "bf16x2" if dtype == DType.bfloat16 else "f16x2"
    return inlined_assembly[
        "cvt.rn." + kind + ".f32 $0, $1, $2;",
        UInt32,
        constraints="=r,f,f",
        has_side_effect=False,
    ](pair[1], pair[0])


@doc_hidden
@always_inline
def unpack_pair[dtype: DType](word: UInt32) -> SIMD[DType.float32, 2]:
    """Widens two elements of 16 bits, the first in the lower half."""
    comptime if dtype == DType.bfloat16:
        # Either half is the upper half of a float32.
        return {
            bitcast[DType.float32](word << 16),
            bitcast[DType.float32](word & 0xFFFF0000),
        }
    else:
        return bitcast[dtype, 2](word).cast[DType.float32]()


@doc_hidden
@always_inline
def multiply_pair(pair: UInt32, other: UInt32) -> UInt32:
    """Multiplies two elements of bfloat16 by two others."""
    return inlined_assembly[
        "mul.rn.bf16x2 $0, $1, $2;",
        UInt32,
        constraints="=r,r,r",
        has_side_effect=False,
    ](pair, other)


@doc_hidden
@always_inline
def matrix_x4(
    address: UInt32,
) -> _RegisterPackType[UInt32, UInt32, UInt32, UInt32]:
    """Loads four 8x8 matrices of 16-bit elements as a warp's fragments; each lane names the address of a row."""
    return inlined_assembly[
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,r,~{memory}",
    ](address)


@doc_hidden
@always_inline
def store_matrix_x4(
    address: UInt32, a: UInt32, b: UInt32, c: UInt32, d: UInt32
):
    """Stores four 8x8 matrices of 16-bit elements from a warp's fragments; each lane names the address of a row."""
    inlined_assembly[
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        NoneType,
        constraints="r,r,r,r,r,~{memory}",
    ](address, a, b, c, d)
