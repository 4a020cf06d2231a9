"""What the commands of this package share: one-line errors, one JSON line, and where a figure comes from."""

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ERROR, INTERRUPTED = 2, 130
COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints take one line."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and exits with 2."""
        self.exit(ERROR, f"error: {message}\n")


def set_device_flags() -> None:
    """Lets a GPU run a whole decoding loop, branches included, without asking the host: on an H200 a step of a small
    model is a fifth faster. Flags of the user's own stay. It must come before jax touches the device."""
    flags = os.environ.get("XLA_FLAGS", "")
    if COMMAND_BUFFERS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{COMMAND_BUFFERS}=+WHILE,+CONDITIONAL".strip()


def run_command(command: Callable[[], int]) -> int:
    """The exit status of a command: its own, 2 after an error of the user's, 130 after Ctrl-C."""
    set_device_flags()
    try:
        return command()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def provenance() -> dict[str, Any]:
    """Device, versions and, in a clone, the commit: what a figure needs beside it."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else "cpu",
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "transformers")},
        "commit": _commit(),
    }


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def to_json(record: dict[str, Any]) -> str:
    """One line of JSON; numbers that it has no word for become null."""
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_text(path: Path) -> str:
    """A text file, whole. Raises OSError or ValueError, one line, if it can't be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
