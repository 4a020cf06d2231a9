"""Each field of `SamplingParams` refuses what lies outside its range, in one line that names it."""

import math
import subprocess
import sys
from typing import Any

import pytest

from infer.params import LAWS, MAX_DRAFT_TOKENS, SamplingParams
from mtp import acceptance

BAD: list[tuple[str, Any]] = [
    ("temperature", -1.0),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", -1),
    ("seed", 2**32),
    ("sample_index", -1),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 129),
    ("stop", ("",)),
    ("stop", "text"),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("a",)),
    ("ignore_eos", 1),
    ("num_draft_tokens", -1),
    ("num_draft_tokens", 8),
    ("num_draft_tokens", 2.0),
    ("verify", "greedy"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refuses(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name}={value!r} must be ") and "\n" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0, "max_tokens": 1, "num_draft_tokens": 0},
        {"temperature": 99.5, "top_k": 10**6, "top_p": 1e-9, "min_p": 1.0, "seed": 2**32 - 1},
        {"max_tokens": 7, "min_tokens": 7, "stop": ["a", "b\n"], "stop_token_ids": [0, 5], "ignore_eos": True},
        {"num_draft_tokens": MAX_DRAFT_TOKENS, "verify": "coupled", "stop": "alone"},
    ],
)
def test_takes_the_ends_of_each_range(fields: dict[str, Any]) -> None:
    params = SamplingParams().with_fields(fields)
    for name, value in fields.items():
        kept = (value,) if name == "stop" and isinstance(value, str) else value
        assert getattr(params, name) == (tuple(kept) if isinstance(kept, list) else kept)
    hash(params)


def test_unknown_fields_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams().with_fields({"temprature": 1.0})


def test_laws_are_those_of_acceptance() -> None:
    assert LAWS == acceptance.LAWS


def test_params_import_nothing_heavy() -> None:
    program = "import sys, infer.params, infer.generate; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
