"""Which implementation of an op is chosen: on this device, on a Hopper GPU, and on one where the kernel can't run."""

import re
import warnings

import jax
import pytest

from mtp.kernels import backend


def pretend(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    """As if jax ran on a GPU, which is Hopper's if nothing is missing."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(backend, "_no_device", lambda: missing)
    backend._say.cache_clear()


def test_without_a_gpu_the_definition_runs_and_nothing_is_said() -> None:
    assert backend.choose("op", None, None) == backend.choose("op", "xla", "too wide") == "xla"
    assert backend.choose("op", "interpret", None) == "interpret"


def test_on_a_hopper_gpu_the_kernel_runs_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert [backend.choose("op", name, None) for name in (None, "mosaic", "xla")] == ["mosaic", "mosaic", "xla"]
    monkeypatch.setattr(backend, "preferred", "xla")
    assert backend.choose("op", None, None) == "xla" and backend.choose("op", "mosaic", None) == "mosaic"


@pytest.mark.parametrize("unfit, missing", [("heads are too wide", None), (None, "this GPU has 8.0")])
def test_a_kernel_that_falls_back_says_so_once(
    unfit: str | None, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, missing)
    with pytest.warns(RuntimeWarning, match=f"op runs without its kernel, slowly: {unfit or missing}"):
        assert backend.choose("op", None, unfit) == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.choose("op", None, unfit) == "xla"


@pytest.mark.parametrize(
    "name, unfit, message",
    [
        ("mosaic", "heads are too wide", "the op kernel can't run: heads are too wide; use implementation='xla'"),
        ("interpret", "heads are too wide", "the op kernel can't run: heads are too wide"),
        ("mosaic", None, "it needs a Hopper GPU and this is cpu"),
        ("triton", None, "implementation='triton' of op must be None or one of xla, mosaic, interpret"),
    ],
)
def test_what_can_not_run_is_refused(name: str, unfit: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        backend.choose("op", name, unfit)
