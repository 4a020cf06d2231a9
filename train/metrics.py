"""A run's metrics.jsonl: a line a logged step, and none of steps that are about to be done again."""

import json
from pathlib import Path
from typing import Any


class Metrics:
    """The file in a run's directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "metrics.jsonl"

    def log(self, record: dict[str, Any]) -> None:
        """Appends a line; `record` has a "step"."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, step: int) -> None:
        """Drops what came after a checkpoint that the run goes on from."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def check_same(ours: dict[str, Any], saved: dict[str, Any], directory: Path) -> None:
    """Raises ValueError, naming them, if settings differ from those of the run that is to be gone on with."""
    changed = [key for key in ours if ours[key] != saved.get(key)]
    if changed:
        raise ValueError(f"cannot resume {directory}: {', '.join(changed)} differ from the saved run's")
