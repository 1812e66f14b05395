"""The ops of this package for MAX graphs and `CustomOpLibrary`."""

from .max.linear_add import FusedNormLinearAdd, FusedNormLinearAddBackward
from .max.layernorm_linear import (
    FusedNormLayerNormLinear,
    FusedNormLayerNormLinearBackward,
)
from .max.rows import (
    ComposedDiv,
    ComposedDivBackward,
    ComposedMean,
    ComposedNorm,
    ComposedNormBackward,
    TrainableEpsLayerNorm,
    TrainableEpsLayerNormBackward,
)
from .max.norm_linear import (
    FusedNormNormLinear,
    FusedNormNormLinearBackward,
    FusedNormNormLinearKnown,
)
from .puzzle.register import LayerNormLinear, LayerNormLinearBackward
