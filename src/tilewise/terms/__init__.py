"""The terms of scores that read tensors, each with a struct of the same name in kernels/common/terms."""

from .alibi import Alibi
from .bias import Bias
from .dropout import Dropout
from .keep import Keep, KeyLengths
from .max_logit import MaxLogit
from .relative_bias import RelativeBias
from .sink import Sink
from .spans import Spans

__all__ = ["Alibi", "Bias", "Dropout", "Keep", "KeyLengths", "MaxLogit", "RelativeBias", "Sink", "Spans"]
