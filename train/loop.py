"""The loop around a trainer's step: steps under way while the host goes on, figures a step late, evaluations, saves.

A trainer brings the step, the batches, what an evaluation and a save are; the loop brings their order, the schedule, a
progress bar and the log. Nothing waits for a figure but the log, and evaluations and saves are no part of a speed.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from mtp.shapes import Array, Float32
from train.metrics import Metrics
from train.step import OptimizerSettings

# Steps that may be under way while the host goes on.
IN_FLIGHT = 2
# The speed that `max_minutes` is turned into steps with is that of the steps in between: the first ones compile.
MEASURE_FROM, MEASURE_TO = 10, 30
# Of a line of metrics.jsonl, what depends on the clock.
TIMINGS = ("seconds", "tokens_per_second", "data_seconds")


class Pace(Protocol):
    """What the loop reads of a run's config."""

    @property
    def name(self) -> str:
        """Of the run."""

    @property
    def steps(self) -> int:
        """At most so many."""

    @property
    def max_minutes(self) -> float:
        """For the steps alone; the schedule is cut to fit."""

    @property
    def log_every(self) -> int:
        """Steps."""

    @property
    def eval_every(self) -> int:
        """Steps; there is always one after the last."""

    @property
    def save_minutes(self) -> float:
        """There is always one at the end."""

    @property
    def optimizer(self) -> OptimizerSettings:
        """It has the schedule."""


class Trainer[B](Protocol):
    """A run: what happens to its state."""

    def batch(self, step: int) -> B:
        """The batch that follows `step` done ones."""

    def step(self, batch: B, learning_rate: Float32[Array, ""]) -> dict[str, Array]:
        """Starts a step; its figures: a "loss", and scalars or one value a depth."""

    def evaluate(self) -> Any:
        """Measures the state as it is, and logs it."""

    def save(self) -> None:
        """Keeps the state as it is."""


@dataclass
class Extent:
    """How long a run is to be; saved with it."""

    total_steps: int
    # whether `max_minutes` has been turned into steps
    settled: bool = False


@dataclass
class Loop[B]:
    """A run under way."""

    trainer: Trainer[B]
    pace: Pace
    extent: Extent
    metrics: Metrics
    # tokens of a batch
    tokens: int
    # steps done before
    first: int

    _under_way: deque[tuple[int, dict[str, Array]]] = field(default_factory=deque)
    # figures, and seconds that making their batches took, since the last line of the log
    _window: list[dict[str, np.ndarray]] = field(default_factory=list)
    _data_seconds: float = 0.0
    _measured_from: float = 0.0

    def run(self) -> float:
        """Does the steps that are left; returns tokens a second, evaluations and saves not counted.

        Raises:
            FloatingPointError: the loss is no finite number.
        """
        self._clock = _Clock()
        saved = time.monotonic()
        pace, extent, step = self.pace, self.extent, self.first
        with tqdm(total=extent.total_steps, initial=step, unit="step", desc=pace.name, dynamic_ncols=True) as self._bar:
            ahead = self._batch(step)
            while step < extent.total_steps:
                rate = jnp.float32(pace.optimizer.rate(step, extent.total_steps))
                figures = self.trainer.step(ahead, rate)
                step += 1
                self._under_way.append((step, figures))
                last = step == extent.total_steps
                if not last:
                    ahead = self._batch(step)
                measures = not extent.settled and step - self.first in (MEASURE_FROM, MEASURE_TO)
                evaluates = last or step % pace.eval_every == 0
                saves = last or time.monotonic() - saved >= 60.0 * pace.save_minutes
                while len(self._under_way) > (0 if measures or evaluates or saves else IN_FLIGHT):
                    self._fetch()
                if measures:
                    self._measure(step)
                with self._clock.paused():
                    if evaluates:
                        self.trainer.evaluate()
                    if saves:
                        self.trainer.save()
                        saved = time.monotonic()
        return (step - self.first) * self.tokens / max(self._clock.seconds, 1e-9)

    def _batch(self, step: int) -> B:
        begun = time.monotonic()
        made = self.trainer.batch(step)
        self._data_seconds += time.monotonic() - begun
        return made

    def _fetch(self) -> None:
        """The figures of the oldest step under way."""
        step, figures = self._under_way.popleft()
        self._window.append(jax.device_get(figures))
        self._bar.update()
        loss = self._window[-1]["loss"]
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step}; lower the learning rate")
        if step % self.pace.log_every == 0 or step == self.extent.total_steps:
            self._log(step)

    def _log(self, step: int) -> None:
        window, seconds = self._window, self._clock.lap()
        mean = {key: np.mean([one[key] for one in window], axis=0).tolist() for key in window[0]}
        speed = len(window) * self.tokens / max(seconds, 1e-9)
        rate = self.pace.optimizer.rate(step - 1, self.extent.total_steps)
        # a resumed run's first line may stand for fewer steps than the others
        about = {"step": step, "num_steps": len(window), "learning_rate": rate}
        timings = dict(zip(TIMINGS, (self._clock.seconds, speed, self._data_seconds), strict=True))
        self.metrics.log(about | timings | mean)
        accepted = "/".join(f"{100 * x:.0f}" for x in mean["overlap"])
        length = f", length {mean['expected_length']:.2f}" if "expected_length" in mean else ""
        self._bar.set_postfix_str(
            f"loss {mean['loss']:.3f}, accept {accepted} %{length}, {speed:,.0f} tokens/s, "
            f"data {100 * self._data_seconds / max(seconds, 1e-9):.0f} % of the time"
        )
        self._window, self._data_seconds = [], 0.0

    def _measure(self, step: int) -> None:
        """Turns `max_minutes` into steps, once their speed is known."""
        if step - self.first == MEASURE_FROM:
            self._measured_from = self._clock.seconds
            return
        seconds_a_step = (self._clock.seconds - self._measured_from) / (MEASURE_TO - MEASURE_FROM)
        fitting = int((60.0 * self.pace.max_minutes - self._clock.seconds) / seconds_a_step)
        self.extent.total_steps = min(self.pace.steps, step + max(fitting, 1))
        self.extent.settled, self._bar.total = True, self.extent.total_steps


class _Clock:
    """Seconds since the start, pauses left out."""

    def __init__(self) -> None:
        self._start = self._lap = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.monotonic()
        since, self._lap = now - self._lap, now
        return since

    @contextmanager
    def paused(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        pause = time.monotonic() - begun
        self._start += pause
        self._lap += pause
