"""The exponentials, losses and factors of a chunk's rows, with Hopper's kernels in bfloat16.

The product's epilogue stores the exponentials of logits minus an offset for each row, and their
sums. The offset is a little more than the largest of 256 of the row's logits, which a small product
computes first. A row whose sum leaves the safe range is recomputed by kernels that the host queues
without checking. When a call begins, the GPU waits for the host, which therefore queues the first
product before any work that the product does not need.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from fused_norm.call.head_record import HeadCall
from fused_norm.call.memory import address
from fused_norm.chain import head_tiles, kernels
from fused_norm.chain.head_rows import Chunk, Others, Rows
from fused_norm.cross_entropy import Head, Loss
from fused_norm.native import build, compiler

# Whether our product computes the gradient of x; tests and measurements compare with PyTorch's.
OWN_DX = True
# Whether the kernel of losses checks the labels, instead of seven small kernels.
CHECKS_LABELS = True
# SMs of an H100: the tile model's default without a GPU.
_PROCESSORS = 132
# Classes whose logits determine a row's offset.
_SAMPLES = 256
# Columns of a tile of the product; with a bias, there is only the second tile.
COLUMNS, COLUMNS_WITH_BIAS = 192, 128
# Memory limit of a chunk if no exponentials are stored.
_SUMS_BYTES = 96 << 20


def serves(t: Head, loss: Loss) -> bool:
    """Return whether the kernels compute a call.

    Args:
        t: The tensors, with rows in one dimension.
        loss: What to compute.
    """
    x, bias = t.x, t.bias
    return (
        are_for(x.device, x.dtype, x.shape[1], None if bias is None else bias.numel(), loss)
        and x.numel() > 0
        and t.weight.numel() > 0
        and t.weight.is_contiguous()
        and t.weight.data_ptr() % kernels.ALIGNMENT == 0
        and (bias is None or bias.data_ptr() % kernels.ALIGNMENT == 0)
    )


def are_for(
    device: torch.device, dtype: torch.dtype, features: int, biases: int | None, loss: Loss
) -> bool:
    """Return whether there are kernels for such calls, whatever the layout of their tensors.

    Args:
        device: The device.
        dtype: Of the product.
        features: Length of a row.
        biases: Length of the bias, None without one.
        loss: What to compute.
    """
    return (
        device.type == "cuda"
        and dtype is torch.bfloat16
        and can_do(loss)
        and kernels.is_hopper(device.index or 0)
        and features % 8 == 0
        # A tile of the bias is copied in bulk, 16 bytes at a time.
        and (biases is None or biases % 8 == 0)
        and is_built()
    )


def can_do(loss: Loss) -> bool:
    """Return whether the kernels support the options of a loss.

    Args:
        loss: What to compute.
    """
    # Behind a softcap, what smoothing subtracts from the gradient is not a matrix of rank one.
    return not (loss.softcap and loss.label_smoothing)


def computes_dx(loss: Loss) -> bool:
    """Return whether our product computes the gradient of x.

    Args:
        loss: What to compute.
    """
    # With smoothed labels, part of it comes from another matrix.
    return OWN_DX and not loss.label_smoothing


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of SMs of a device."""
    if device.type != "cuda":
        return _PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def is_built() -> bool:
    """Return whether the kernels are built or can be."""
    return compiler.version() is not None or build.is_built(_extension())


def _extension() -> build.Extension:
    return build.Extension(build.HEAD_EXTENSION, build.HEAD_DTYPE, "nvidia:sm_90a")


def rows_of_sums(V: int) -> int:
    """Return the most rows of a chunk if only the loss is wanted.

    Args:
        V: Size of the vocabulary.
    """
    # Each row stores two numbers for each tile.
    return max(_SUMS_BYTES // (8 * -(-V // COLUMNS_WITH_BIAS)), 1)


def scale_in_place(tensor: Tensor, scale: Tensor) -> None:
    """Multiply a gradient by that of the loss; if this is 1, the tensor is not read.

    Args:
        tensor: A dense tensor in bfloat16 or float32 on a Hopper GPU.
        scale: One element, float32.
    """
    call = HeadCall()
    call.tensor, call.count, call.scale = tensor.data_ptr(), tensor.numel(), scale.data_ptr()
    call.is_float32 = tensor.dtype is torch.float32
    run("scale", call, tensor.device)


def run(function: str, call: HeadCall, device: torch.device) -> None:
    """Run a function of the kernels' extension.

    Args:
        function: Its name.
        call: Its record.
        device: The device.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    module, call.context = kernels.launcher(_extension(), index, stream, kernels.is_alone())
    with torch.cuda.device(device):
        getattr(module, function)(ctypes.addressof(call))


class Chunks:
    """The memory and the record of one chunk, which all chunks of a call reuse."""

    def __init__(self, t: Head, loss: Loss, size: int, keeps: bool) -> None:
        """Allocate the memory of a chunk.

        Args:
            t: The tensors, with rows in one dimension.
            loss: What to compute.
            size: Most rows of a chunk.
            keeps: Whether exponentials are wanted for gradients.
        """
        (M, K), V = t.x.shape, t.weight.shape[0]
        self.x = t.x if t.x.is_contiguous() else t.x.contiguous()
        if self.x.data_ptr() % kernels.ALIGNMENT:
            self.x = self.x.clone()
        self.target = t.target.contiguous()
        self.t, self.loss, self.keeps = t, loss, keeps
        wide = functools.partial(self.x.new_empty, dtype=torch.float32)
        self.columns = COLUMNS if t.bias is None else COLUMNS_WITH_BIAS
        tiles = -(-V // self.columns)
        # A row of exponentials starts at a multiple of 16 bytes.
        pitch = -(-V // 8) * 8
        self.exponentials = self.x.new_empty((size, pitch)) if keeps else None
        self.scaled = self.x.new_empty((size, K)) if keeps else None
        # The sum and the largest logit of each tile of a row, and whether any sum is out of range.
        self.of_tiles = wide(2 * size * tiles + 1)
        # For each row: its offset, its sum, its factor.
        self.of_rows = wide((3, M))
        step = max(V // _SAMPLES, 1)
        self.samples = torch.mm(self.x, t.weight[::step][:_SAMPLES].t())
        self.has_terms = False
        # Whether all labels are in range, if the kernel of losses checks that.
        self.are_in_range: Tensor | None = None
        self.class_weight: Tensor | None = None
        self.mean_weight: Tensor | None = None
        self.mean_bias: Tensor | None = None
        call = self.call = HeadCall()
        call.K, call.V, call.pitch, call.tiles, call.columns = K, V, pitch, tiles, self.columns
        call.weight, call.bias = address(t.weight), address(t.bias)
        call.exponentials, call.scaled = address(self.exponentials), address(self.scaled)
        call.partials = address(self.of_tiles)
        call.maxima = call.partials + 4 * size * tiles
        call.is_any_bad = call.maxima + 4 * size * tiles
        call.sample_count, call.sample_step = self.samples.shape[1], step
        call.ignore_index, call.label_smoothing = loss.ignore_index, loss.label_smoothing
        call.z_loss, call.softcap = loss.z_loss, loss.softcap
        # Addresses of the first row.
        self.first = (address(self.x), address(self.samples), address(self.of_rows))

    def begin(self, part: slice) -> None:
        """Queue the exponentials of some rows; the results are valid until the next call.

        Args:
            part: The slice of the rows.
        """
        # Addresses are computed here: slicing tensors would delay the GPU when a call begins.
        call, (x, samples, of_rows) = self.call, self.first
        call.M = part.stop - part.start
        call.x = x + 2 * part.start * call.K
        call.samples = samples + 2 * part.start * call.sample_count
        call.offsets = of_rows + 4 * part.start
        call.sums = call.offsets + 4 * len(self.x)
        run("exponentials", call, self.x.device)

    def _terms_of_classes(self) -> None:
        """Sum what losses need of the class weights and of smoothed labels."""
        t, call, self.has_terms = self.t, self.call, True
        if CHECKS_LABELS:
            self.are_in_range = self.x.new_ones(1, dtype=torch.int32)
            call.are_in_range = address(self.are_in_range)
        each = self.class_weight
        if t.class_weight is not None:
            each = self.class_weight = t.class_weight.float().contiguous()
            self.class_sum = each.sum().reshape(1)
            call.class_weight, call.class_weight_sum = address(each), address(self.class_sum)
        if not self.loss.label_smoothing:
            return
        if each is None:
            each = self.x.new_ones(call.V, dtype=torch.float32)
            self.mean_weight = t.weight.sum(0, dtype=torch.float32)
        else:
            self.mean_weight = weighted_rows(t.weight, each)
        self.class_weight_of_others = each
        if t.bias is not None:
            self.mean_bias = (t.bias.float() @ each).reshape(1)
        call.mean_weight, call.mean_bias = address(self.mean_weight), address(self.mean_bias)

    def rows(self, chunk: Chunk) -> Rows | None:
        """Compute losses and factors from the exponentials of the last rows passed to `begin`.

        Returns None if no gradients are wanted.

        Args:
            chunk: Its rows.
        """
        if not self.has_terms:
            self._terms_of_classes()
        call, part = self.call, chunk.rows
        factors, count = self.of_rows[2, part], self.call.M
        scales = None if chunk.scales is None else chunk.scales.contiguous()
        of_logsumexp = chunk.logsumexp_scales
        of_logsumexp = None if of_logsumexp is None else of_logsumexp.contiguous()
        call.target = address(self.target[part])
        call.scales, call.logsumexp_scales = address(scales), address(of_logsumexp)
        numbers = (chunk.losses, chunk.logsumexp, factors)
        call.losses, call.logsumexp, call.factors = map(address, numbers)
        run("rows", call, self.x.device)
        if self.exponentials is None or self.scaled is None or scales is None:
            return None
        others = None
        if self.mean_weight is not None:
            smooth = self.loss.label_smoothing / call.V
            others = Others(scales * smooth, self.class_weight_of_others, self.mean_weight)
        e = self.exponentials[:count, : call.V]
        return Rows(e, factors, self.scaled[:count], others)

    def input_gradient(self, dx: Tensor, rows: Rows) -> None:
        """Queue the gradient of the last rows of x, without the part in `Rows.others`.

        Args:
            dx: The gradient of the rows, written; dense.
            rows: The result of `rows`.
        """
        call = self.call
        tile = head_tiles.best_tile(len(dx), call.K, call.V, processors(dx.device))
        call.dx, call.factors = address(dx), address(rows.factors)
        call.dx_columns, call.dx_is_split = tile.columns, tile.is_split
        run("input_gradient", call, dx.device)


def weighted_rows(weight: Tensor, factors: Tensor) -> Tensor:
    """Return factors times the weight, in float32 without a float32 copy of the weight."""
    total = weight.new_zeros(weight.shape[1], dtype=torch.float32)
    for rows, own in zip(weight.split(8192), factors.split(8192), strict=True):
        total += own @ rows.float()
    return total
