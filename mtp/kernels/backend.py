"""Which implementation of an op runs: its Mosaic GPU kernel, or the plain jnp form that defines it.

Every op takes `implementation`: None picks the kernel where it runs, "xla" and "mosaic" insist on one, and "interpret"
runs the kernel's body on any device, slowly, to test it.
"""

import warnings
from functools import cache

import jax

IMPLEMENTATIONS = ("xla", "mosaic", "interpret")
# What None stands for in this process, where it isn't None; set it before anything is compiled.
preferred: str | None = None


def choose(op: str, implementation: str | None, unfit: str | None) -> str:
    """The implementation that an op runs.

    Args:
        op: its name, for messages.
        implementation: what the caller asked for.
        unfit: why the kernel can't take these shapes or types; None if it can.

    Returns:
        One of `IMPLEMENTATIONS`. Where a GPU has to fall back to the jnp form, a warning says why, once.

    Raises:
        ValueError: an unknown name, or a kernel was insisted on that can't run.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} of {op} must be None or one of {', '.join(IMPLEMENTATIONS)}")
    implementation = implementation or preferred
    missing = unfit if unfit is not None or implementation == "interpret" else _no_device()
    if implementation in ("mosaic", "interpret"):
        if missing is not None:
            raise ValueError(f"the {op} kernel can't run: {missing}; use implementation='xla'")
        return implementation
    if implementation == "xla" or jax.default_backend() != "gpu":
        return "xla"
    if missing is not None:
        _say(op, missing)
        return "xla"
    return "mosaic"


@cache
def _no_device() -> str | None:
    """Why this process has no device for the kernels."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs a Hopper GPU and this is {device.platform}"
    capability = getattr(device, "compute_capability", "unknown")
    return None if capability == "9.0" else f"it needs compute capability 9.0 and this GPU has {capability}"


@cache
def _say(op: str, reason: str) -> None:
    warnings.warn(f"{op} runs without its kernel, slowly: {reason}", RuntimeWarning, stacklevel=4)
