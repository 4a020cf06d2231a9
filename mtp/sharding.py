"""One mesh from the start: axis names of parameters and cache fields, and where each lives.

Every parameter and every cache field names its axes; `RULES` says which mesh axis each name is cut along. One device is
a mesh of size one, so there is no second code path.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

RULES: dict[str, str] = {
    "lanes": "data",
    "vocab": "tensor",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
}


def make_mesh(data: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `data` x `tensor` devices (the first ones, unless `devices` are given).

    Raises:
        ValueError: fewer devices than `data * tensor`.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < data * tensor:
        raise ValueError(f"a mesh of {data=} x {tensor=} needs {data * tensor} devices, found {len(devices)}")
    grid = np.asarray(devices[: data * tensor]).reshape(data, tensor)
    return Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))


def param_sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Where an array with these named axes lives; an axis that its mesh axis does not divide is kept whole."""
    spec: list[str | None] = []
    for name, size in zip(axes, shape, strict=True):
        target = RULES.get(name) if name else None
        spec.append(target if target and size % mesh.shape[target] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def shard_params[M: nnx.Module](module: M, mesh: Mesh) -> M:
    """The module with each parameter placed by the axes it carries."""
    graph, state = nnx.split(module)
    place = lambda p: p.replace(jax.device_put(p[...], param_sharding(mesh, p.axes, p.shape)))  # noqa: E731
    return nnx.merge(graph, jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))
