"""The letters used for array axes, and the array types that public signatures share.

A signature names its axes with these letters; inside a function einsum strings and short comments speak.

    B  lane, or row of a training batch      N  query heads
    T  tokens in this call                   K  key/value heads
    S  cached tokens                         H  head dim of attention
    D  width of the residual stream          P  pages in the pool
    F  width of the MLP                      M  pages a lane may hold
    V  vocabulary                            R  rows of a window: one token and its k drafts
    C  channels of the causal convolution    W  its taps
    Q  key heads of the delta rule           U  its value heads
    Y  its key dim                           Z  its value dim
"""

from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

Tokens = Int32[Array, "B T"]
PerLane = Int32[Array, "B"]
LaneMask = Bool[Array, "B"]
Hidden = Float[Array, "B T D"]
Logits = Float32[Array, "B T V"]

__all__ = [
    "Array",
    "Bool",
    "Float",
    "Float32",
    "Hidden",
    "Int32",
    "LaneMask",
    "Logits",
    "PerLane",
    "Tokens",
    "UInt32",
]
