"""What a run logs: metrics.jsonl, a line a logged step and none of steps that are about to be done again; the same
figures for TensorBoard in `tensorboard/`; and, if asked for, at Weights & Biases."""

import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class Metrics:
    """The logs in a run's directory."""

    def __init__(self, directory: Path, wandb_project: str = "", config: Mapping[str, Any] | None = None) -> None:
        """`wandb_project` also sends the figures there; a resumed run goes on with its own.

        Raises:
            ValueError: wandb is not installed.
        """
        self.path = directory / "metrics.jsonl"
        self._directory = directory
        self._purge_from: int | None = None
        self._writer: SummaryWriter | None = None
        self._wandb = None
        if wandb_project:
            try:
                import wandb
            except ImportError:
                raise ValueError(f"{wandb_project=} needs wandb: pip install 'qwen35-mtp[wandb]'") from None
            # other runs may have a directory of the same name
            known = directory / "wandb_id"
            if not known.exists():
                known.write_text(secrets.token_hex(8), encoding="utf-8")
            self._wandb = wandb.init(
                project=wandb_project, name=directory.name, id=known.read_text("utf-8"), resume="allow", config=config
            )

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends a line; `record` has a "step", and numbers, lists or mappings of them."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self._writer is None:
            # files are told apart by the second they were begun in: a run may be gone on with in the same one
            self._writer = SummaryWriter(
                str(self._directory / "tensorboard"),
                purge_step=self._purge_from,
                filename_suffix=f".{record['step']}",
            )
        step, figures = record["step"], dict(scalars({k: v for k, v in record.items() if k != "step"}))
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(figures, step=step)

    def forget_after(self, step: int) -> None:
        """Drops what came after a checkpoint that the run goes on from; before the first `log`."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._purge_from = step + 1

    def close(self) -> None:
        """Writes what is still held back."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def scalars(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number in nested figures by its path; those of a list are numbered from 1, as depths are."""
    for name, value in figures.items():
        if isinstance(value, (list, tuple)):
            value = {str(place): one for place, one in enumerate(value, 1)}
        if isinstance(value, Mapping):
            for inner, one in scalars(value):
                yield f"{name}/{inner}", one
        elif isinstance(value, (int, float)):
            yield name, float(value)


def check_same(ours: dict[str, Any], saved: dict[str, Any], directory: Path) -> None:
    """Raises ValueError, naming them, if settings differ from those of the run that is to be gone on with."""
    changed = [key for key in ours if ours[key] != saved.get(key)]
    if changed:
        raise ValueError(f"cannot resume {directory}: {', '.join(changed)} differ from the saved run's")
