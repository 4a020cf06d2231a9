"""Weights as arguments of jitted functions, flattened once instead of with every call.

Flattening a module takes 13 us a tensor, in Python: with a few steps a call that is longer than the steps of a small
model take. A packed module is a tuple of its tensors, and what it looks like is compared by identity.
"""

from typing import Any

import jax
from flax import nnx


class _Structure:
    """The structure of a module; one object for all that are equal, so that they share their compiled programs."""

    known: dict[Any, "_Structure"] = {}

    def __init__(self, treedef: Any) -> None:
        self.treedef = treedef

    @classmethod
    def of(cls, treedef: Any) -> "_Structure":
        return cls.known.setdefault(treedef, cls(treedef))


@jax.tree_util.register_pytree_node_class
class Packed[M: nnx.Module | None]:
    """A module, or None, ready to be passed to jitted functions; they `unpack` it."""

    def __init__(self, module: M) -> None:
        self._leaves, treedef = jax.tree.flatten(module)
        self._structure = _Structure.of(treedef)

    @property
    def module(self) -> M:
        """What was packed."""
        return jax.tree.unflatten(self._structure.treedef, self._leaves)

    def tree_flatten(self) -> tuple[tuple[list[jax.Array]], _Structure]:
        """For jax."""
        return (self._leaves,), self._structure

    @classmethod
    def tree_unflatten(cls, structure: _Structure, children: tuple[list[jax.Array]]) -> "Packed[M]":
        """For jax."""
        made = object.__new__(cls)
        made._structure, (made._leaves,) = structure, children
        return made


def unpack[M: nnx.Module | None](module: M | Packed[M]) -> M:
    """The module itself."""
    return module.module if isinstance(module, Packed) else module
