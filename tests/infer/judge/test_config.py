"""The judge's configs: shapes that the issue names, and numbers that can't work together."""

from typing import Any

import pytest

from infer.judge.config import Controls, JudgeConfig, Replies, Texts, Workload
from mtp.config import load_toml


def load(name: str, *overrides: str) -> JudgeConfig:
    return load_toml(JudgeConfig, f"configs/infer/judge_{name}.toml", overrides)


def test_27b_has_the_shapes_of_the_engine_to_beat() -> None:
    config = load("27b")
    shapes = [(w.lanes, w.num_requests, w.prompt_tokens, w.reply_tokens) for w in (config.team, config.busy)]
    assert shapes == [(16, 16, 512, 256), (160, 160, 2048, 2048)]
    assert (config.solo.lanes, config.solo.prompt_tokens, config.solo.reply_tokens) == (1, 512, 256)
    assert {config.solo.window, config.team.window, config.busy.window} == {"whole"}


def test_closed_loads_have_three_times_as_many_requests_as_lanes_and_a_pool_that_they_fill() -> None:
    longer = ("busy.lanes=84", "busy.num_requests=252", "busy.prompt_tokens=4096", "busy.reply_tokens=4096")
    for config in (load("27b_closed"), load("27b_closed", *longer, "busy.pool_tokens=516096")):
        busy = config.busy
        assert busy.num_requests == 3 * busy.lanes and busy.window == "full" and busy.stagger > 0
        # what the lanes hold on average
        assert busy.pool_tokens == busy.lanes * (busy.prompt_tokens + busy.reply_tokens // 2)


WORKLOAD: dict[str, Any] = dict(lanes=2, num_requests=4, prompt_tokens=8, reply_tokens=8, pool_tokens=64)
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"lanes": 0}, "lanes=0 must be at least 1"),
    ({"pool_tokens": 15}, "pool_tokens=15 can't hold one request of 16 tokens"),
    ({"stagger": 1.0}, "stagger=1.0 must be from 0"),
    ({"window": "some"}, "window='some' must be one of whole, refill, full"),
    ({"window": "refill", "num_requests": 2}, "num_requests=2 must exceed lanes=2"),
    ({"full_share": 0.0}, "full_share=0.0"),
)


@pytest.mark.parametrize("fields, message", WRONG)
def test_shapes_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**(WORKLOAD | fields))


def test_samples_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="looks=5 must be at most 4"):
        Replies(num_prompts=1, max_tokens=1, looks=5)
    with pytest.raises(ValueError, match="budget_seconds=0"):
        Replies(num_prompts=1, max_tokens=1, budget_seconds=0)
    with pytest.raises(ValueError, match="two tokens"):
        Texts(num_texts=1, max_tokens=1)
    with pytest.raises(ValueError, match="leak"):
        Controls(leak=0.0, stale_every=1, num_prompts=1)
