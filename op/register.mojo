"""All that MAX graphs and `CustomOpLibrary` find here; each struct names its op beside its signature."""

from .max.linear_add import FusedNormLinearAdd, FusedNormLinearAddBackward
from .max.norm_linear import (
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
from .max.seam import (
    FusedNormNormLinear,
    FusedNormNormLinearBackward,
    FusedNormNormLinearKnown,
)
from .puzzle.register import LayerNormLinear, LayerNormLinearBackward
