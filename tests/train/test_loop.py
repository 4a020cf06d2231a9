"""The loop of the trainers around a trainer that only takes notes, its logs, and checkpoints that are cut off."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from train import loop
from train.checkpoint import Checkpoints
from train.loop import TIMINGS, Extent, Loop
from train.metrics import Metrics, scalars
from train.step import OptimizerSettings

OPTIMIZER = OptimizerSettings(learning_rate=1.0, final_fraction=0.1, warmup_steps=2, weight_decay=0.0)


@dataclasses.dataclass(frozen=True)
class Settings:
    name: str = "noted"
    steps: int = 10
    max_minutes: float = 60.0
    log_every: int = 3
    eval_every: int = 4
    save_minutes: float = 60.0
    optimizer: OptimizerSettings = OPTIMIZER


class Noted:
    """Notes what is asked of it; its loss is the number of its batch."""

    def __init__(self, bad: int = -1) -> None:
        self.notes: list[Any] = []
        self.bad = bad

    def batch(self, step: int) -> int:
        return step

    def step(self, batch: int, learning_rate: jax.Array) -> dict[str, jax.Array]:
        self.notes.append(batch)
        loss = np.nan if batch == self.bad else batch
        return {"loss": jnp.float32(loss), "overlap": jnp.array([0.5, 0.25]) * batch}

    def evaluate(self) -> None:
        self.notes.append("evaluate")

    def save(self) -> None:
        self.notes.append("save")


def run(trainer: Noted, out: Path, settings: Settings | None = None, first: int = 0) -> tuple[Extent, list[dict]]:
    settings = settings or Settings()
    extent = Extent(settings.steps)
    out.mkdir(exist_ok=True)
    metrics = Metrics(out)
    try:
        assert Loop(trainer, settings, extent, metrics, 7, first).run() > 0
    finally:
        metrics.close()
    return extent, [json.loads(line) for line in metrics.path.read_text().splitlines()]


def test_every_step_once_in_order_and_means_of_the_steps_between(tmp_path: Path) -> None:
    trainer = Noted()
    _, lines = run(trainer, tmp_path)
    assert trainer.notes == [0, 1, 2, 3, "evaluate", 4, 5, 6, 7, "evaluate", 8, 9, "evaluate", "save"]
    assert [(line["step"], line["num_steps"], line["loss"]) for line in lines] == [
        (3, 3, 1.0),
        (6, 3, 4.0),
        (9, 3, 7.0),
        (10, 1, 9.0),
    ]
    assert lines[1]["overlap"] == [2.0, 1.0] and lines[3]["learning_rate"] == pytest.approx(0.1)
    assert all(line[name] >= 0 for line in lines for name in TIMINGS)
    # gone on with in the middle of what a line stands for: it says so
    later, lines = run(Noted(), tmp_path / "later", first=7)[0], run(Noted(), tmp_path / "again", first=7)[1]
    assert later.total_steps == 10 and [(line["step"], line["num_steps"]) for line in lines] == [(9, 2), (10, 1)]


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    trainer = Noted(bad=4)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 5; lower the learning rate"):
        run(trainer, tmp_path)
    assert "save" not in trainer.notes


def test_minutes_become_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ten steps take ten seconds each, the others one: of 170 s, 50 are left behind step 30. Evaluations are
    free."""
    now = 0.0

    class Slow(Noted):
        def step(self, batch: int, learning_rate: jax.Array) -> dict[str, jax.Array]:
            nonlocal now
            now += 10.0 if batch < 10 else 1.0
            return super().step(batch, learning_rate)

        def evaluate(self) -> None:
            nonlocal now
            now += 1000.0

    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    settings = Settings(steps=500, max_minutes=170 / 60, eval_every=20)
    extent, lines = run(Slow(), tmp_path, settings)
    assert extent == Extent(80, settled=True) and lines[-1]["step"] == 80
    assert lines[-1]["seconds"] == pytest.approx(170.0) and lines[-1]["learning_rate"] == pytest.approx(0.1)


def test_wsd_stays_at_the_peak_and_falls_at_the_end() -> None:
    wsd = dataclasses.replace(OPTIMIZER, schedule="wsd", decay_fraction=0.25)
    rates = [wsd.rate(step, 20) for step in range(20)]
    assert rates[:2] == [0.5, 1.0] and rates[2:15] == [1.0] * 13
    np.testing.assert_allclose(rates[15:], [0.82, 0.64, 0.46, 0.28, 0.1])
    # a longer run has the same beginning: it can be made from a checkpoint of the plateau
    assert [wsd.rate(step, 40) for step in range(15)] == rates[:15]
    with pytest.raises(ValueError, match="optimizer.schedule='linear' must be one of cosine, wsd"):
        dataclasses.replace(OPTIMIZER, schedule="linear")


# Logs


def events(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """What TensorBoard would read, without what a later file of the run purges."""
    kept: list[tuple[int, dict[str, float]]] = []
    for path in sorted((directory / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.HasField("session_log"):
                kept = [one for one in kept if one[0] < event.step]
            values = {value.tag: value.simple_value for value in event.summary.value}
            kept += [(event.step, values)] if values else []
    return kept


def test_tensorboard_has_the_figures_of_the_log_and_forgets_with_it(tmp_path: Path) -> None:
    for first, value in ((1, 0.5), (3, 0.75)):
        metrics = Metrics(tmp_path)
        metrics.forget_after(first - 1)
        for step in range(first, 5):
            metrics.log({"step": step, "loss": value, "held_out": {"overlap": [value, 1], "note": "text"}})
        metrics.close()
    lines = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    expected = [(line["step"], name, x) for line in lines for name, x in scalars(line) if name != "step"]
    assert {name for _, name, _ in expected} == {"loss", "held_out/overlap/1", "held_out/overlap/2"}
    assert [(step, name, x) for step, values in events(tmp_path) for name, x in values.items()] == expected
    assert [line["loss"] for line in lines] == [0.5, 0.5, 0.75, 0.75]


def test_wandb_is_sent_the_figures_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb_project='heads' needs wandb: pip install"):
        Metrics(tmp_path, "heads")
    sent: list[Any] = []
    session = types.SimpleNamespace(
        log=lambda figures, step: sent.append((step, figures)), finish=lambda: sent.append("end")
    )
    fake = types.SimpleNamespace(init=lambda **options: sent.append(options) or session)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    metrics = Metrics(tmp_path, "heads", {"steps": 3})
    metrics.log({"step": 2, "kl": [0.5]})
    metrics.close()
    assert sent[0]["project"] == "heads" and sent[0]["config"] == {"steps": 3} and sent[0]["resume"] == "allow"
    assert sent[1:] == [(2, {"kl/1": 0.5}), "end"]
    # gone on with, it is the same run; one in another directory of that name is another
    Metrics(tmp_path, "heads")
    (tmp_path / tmp_path.name).mkdir()
    Metrics(tmp_path / tmp_path.name, "heads")
    assert sent[0]["id"] == sent[3]["id"] != sent[4]["id"] and sent[0]["name"] == sent[4]["name"]


# Checkpoints


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noise:
    values: jax.Array
    step: jax.Array


KILLED = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp
from tests.train.test_loop import Noise
from train.checkpoint import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.save(Noise(jnp.full(3_000_000, 1.0), jnp.int32(1)), {"at": 1})
checkpoints._manager.wait_until_finished()
checkpoints.save(Noise(jnp.full(3_000_000, 2.0), jnp.int32(2)), {"at": 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_killed_while_saving_goes_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    """Killed with the second save under way: what is found is one of the two, and all of it; another save follows."""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, cwd=root, check=False)
    assert done.returncode == -9
    checkpoints = Checkpoints(tmp_path)
    like = Noise(jnp.zeros(3_000_000), jnp.int32(0))
    state, about = checkpoints.restore(like)
    assert about["at"] == int(state.step) in (1, 2)
    assert (np.asarray(state.values) == about["at"]).all()
    checkpoints.save(Noise(state.values + 1, jnp.int32(3)), {"at": 3})
    assert checkpoints.restore(like)[1] == {"at": 3}
    checkpoints.close()


def test_a_save_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    """The next step may take the arrays over while they are still being written."""
    checkpoints = Checkpoints(tmp_path)
    state = Noise(jnp.arange(1_000_000.0), jnp.int32(1))
    checkpoints.save(state, {})
    moved = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)(state)
    found, _ = checkpoints.restore(moved)
    checkpoints.close()
    np.testing.assert_array_equal(found.values, np.arange(1_000_000.0))
