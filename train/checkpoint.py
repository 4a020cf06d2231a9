"""Saving a training run and taking it up again: parameters, moments, step, and what the run had settled.

A checkpoint appears whole or not at all (orbax writes beside it and renames), while the run goes on. Data need no state
of their own: a batch is a function of the seed and the step.
"""

from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp

KEPT = 2


class State(Protocol):
    """A pytree that counts its steps."""

    @property
    def step(self) -> Any:
        """Steps done."""


class Checkpoints:
    """The newest checkpoints of a run, in one directory."""

    def __init__(self, directory: Path, kept: int = KEPT) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=kept, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """Steps done at the newest checkpoint."""
        return self._manager.latest_step()

    def save(self, state: State, run: dict[str, Any]) -> None:
        """Writes the state and `run`, a JSON object, unless this step has been written already.

        The values are those of now, whatever becomes of the arrays; `close` waits for the last of them.
        """
        step = int(state.step)
        if step != self.latest:
            args = ocp.args.Composite(state=ocp.args.StandardSave(_flat(state)), run=ocp.args.JsonSave(run))
            self._manager.save(step, args=args)

    def restore[S: State](self, like: S) -> tuple[S, dict[str, Any]]:
        """The newest checkpoint, in the shapes, dtypes and places of `like`, and its `run`.

        Raises:
          FileNotFoundError: if there is none.
        """
        self._manager.wait_until_finished()
        if self.latest is None:
            raise FileNotFoundError(f"{self._manager.directory} has no checkpoint to resume from")
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _flat(like))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target), run=ocp.args.JsonRestore())
        saved = self._manager.restore(self.latest, args=args)
        leaves = [saved.state[key] for key in _flat(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), saved.run

    def close(self) -> None:
        """Waits for the last save to be whole, and ends orbax's threads."""
        self._manager.close()


def _flat(state: State) -> dict[str, Any]:
    """Leaves by their path, in the order of the tree: a layout that outlives the classes it came from."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
