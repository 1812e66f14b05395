"""The op family for MAX, by passes around products: norm + Linear and Linear + sum, forward and backward."""

from . import norm_linear_cpu
from ..call import Call
from ..norm_linear.cpu.activation import before_activation
from ..norms.norm import Norm
from .device import Device
from .norm_call import products


def forward[
    target: StaticString, dtype: DType, ThisNorm: Norm
](device: Device[target], call: Call) raises:
    """Computes y, and the sum, mean, rstd and the product before its activation where they are wanted.

    Parameters:
        target: The device's kind.
        dtype: The type of x.
        ThisNorm: The norm.

    Args:
        device: Where to run.
        call: The forward, without workspace.

    Raises:
        If a launch fails.
    """
    comptime if target == "cpu":
        norm_linear_cpu.forward[dtype, ThisNorm](call)
    else:
        forward_around_product[target, dtype](device, call)


def forward_around_product[
    target: StaticString, dtype: DType
](device: Device[target], call: Call) raises:
    """Does the same where statistics are known, too.

    Parameters:
        target: The device's kind.
        dtype: The type of x.

    Args:
        device: Where to run.
        call: The forward, without workspace.

    Raises:
        If a launch fails.
    """
    var z = device.room[dtype](call.M * call.K)
    var placed = call
    placed.z = Int(z.unsafe_ptr())
    device.normalize[dtype](placed)
    var product = _sized(call.M, call.K, products(call))
    product.weight = call.weight
    product.bias = call.bias
    product.x = placed.z
    product.y = call.y
    if call.activation == 0:
        device.linear[dtype](product)
    else:
        var h = device.room[dtype](
            0 if call.h != 0 else call.M * products(call)
        )
        placed.h = call.h if call.h != 0 else Int(h.unsafe_ptr())
        placed.a = call.y
        product.y = placed.h
        device.linear[dtype](product)
        device.activate[dtype](placed)
        _ = h^
    _ = z^


def backward[
    target: StaticString, dtype: DType, ThisNorm: Norm
](device: Device[target], call: Call) raises:
    """Computes which gradients are wanted, and the activation once more where that is.

    Parameters:
        target: The device's kind.
        dtype: The type of x.
        ThisNorm: The norm.

    Args:
        device: Where to run.
        call: The backward, without workspace; dy is the gradient of what the forward returned.

    Raises:
        If a launch fails.
    """
    var linear = call
    var dh = device.room[dtype](
        call.M * products(call) if call.activation != 0 else 0
    )
    if call.activation != 0:
        linear.da = call.dy
        linear.dh = Int(dh.unsafe_ptr())
        device.activate_backward[dtype](linear)
        linear = before_activation(linear)
        linear.dbias = 0
    comptime if target == "cpu":
        if call.groups == 0:
            norm_linear_cpu.backward[dtype, ThisNorm](linear)
            _ = dh^
            return
    _backward_around_products[dtype](device, linear)
    _ = dh^


def _backward_around_products[
    target: StaticString, //, dtype: DType
](device: Device[target], call: Call) raises:
    # dz = dy W; then z takes its place, for dy^T z
    var z = device.room[dtype](call.M * call.K)
    var placed = call
    var product = _sized(call.M, call.K, call.N)
    product.dy = call.dy
    product.weight = call.weight
    product.dx = Int(z.unsafe_ptr())
    var over_rows = call.dgamma | call.dbeta | call.dscale | call.dshift
    if (call.dx | over_rows) != 0:
        device.linear_backward[dtype](product)
        placed.dz = product.dx
    if call.dweight != 0:
        placed.z = product.dx
    device.normalize_backward[dtype](placed)
    if call.dweight != 0:
        product.x = placed.z
        product.dx = 0
        product.dweight = call.dweight
        device.linear_backward[dtype](product)
    _ = z^


def linear_add[
    target: StaticString, dtype: DType
](device: Device[target], call: Call) raises:
    """Computes y = x W^T + bias + residual, and its rows' mean and rstd where they are wanted.

    Parameters:
        target: The device's kind.
        dtype: The type of x.

    Args:
        device: Where to run.
        call: A forward that names these, without workspace.

    Raises:
        If a launch fails.
    """
    var product = device.room[dtype](
        call.M * call.N if call.residual != 0 else 0
    )
    var linear = _sized(call.M, call.K, call.N)
    linear.x = call.x
    linear.weight = call.weight
    linear.bias = call.bias
    linear.y = call.y if call.residual == 0 else Int(product.unsafe_ptr())
    device.linear[dtype](linear)
    if (call.residual | call.mean | call.rstd) != 0:
        var sum = _sized(call.M, call.N, 0)
        sum.x = linear.y
        sum.residual = call.residual
        sum.sum = call.y if call.residual != 0 else 0
        sum.mean = call.mean
        sum.rstd = call.rstd
        sum.eps = call.eps
        sum.normalization = call.normalization
        device.normalize[dtype](sum)
    _ = product^


def linear_add_backward[
    target: StaticString, dtype: DType
](device: Device[target], call: Call) raises:
    """Computes which of dx, dweight and dbias are wanted.

    Parameters:
        target: The device's kind.
        dtype: The type of x.

    Args:
        device: Where to run.
        call: A backward that names these, without workspace.

    Raises:
        If a launch fails.
    """
    if (call.dx | call.dweight) != 0:
        var product = call
        product.dbias = 0
        device.linear_backward[dtype](product)
    if call.dbias != 0:
        var sums = _sized(call.M, 0, call.N)
        sums.da = call.dy
        sums.dbias = call.dbias
        device.activate_backward[dtype](sums)


def _sized(M: Int, K: Int, N: Int) -> Call:
    var call = Call()
    call.M, call.K, call.N = M, K, N
    return call
