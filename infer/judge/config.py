"""What the judge measures: the shapes of its workloads and the sizes of its samples, read from a TOML file.

Every number is a size, a count or a limit; what they are checked against is said with both values.
"""

import dataclasses
from dataclasses import dataclass

WORKLOADS = ("solo", "team", "busy")
# What of a pass is timed: first submission to last token; until nobody waits; while the pool is full and others wait.
WINDOWS = ("whole", "refill", "full")


@dataclass(frozen=True)
class Workload:
    """A load. Timed replies have exactly the length that is asked for."""

    lanes: int
    num_requests: int
    prompt_tokens: int
    # the mean; lengths are spread evenly over this much (a share) to either side
    reply_tokens: int
    # of both arms, in tokens
    pool_tokens: int
    stagger: float = 0.0
    # one of WINDOWS
    window: str = "whole"
    # share of the pool that counts as full
    full_share: float = 0.9
    # the candidate's k
    num_draft_tokens: int = 3
    # tokens a page
    page_size: int = 64
    # decoding steps between two looks of the host
    steps_per_turn: int = 8
    # rows that prompts are read in, and prompts that are read in one call
    chunk_lengths: tuple[int, ...] = (32, 128, 512)
    prefill_lanes: int = 4

    def __post_init__(self) -> None:
        for name in (
            "lanes",
            "num_requests",
            "prompt_tokens",
            "reply_tokens",
            "pool_tokens",
            "page_size",
            "steps_per_turn",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.stagger < 1:
            raise ValueError(f"stagger={self.stagger} must be from 0 up to 1")
        if not 0 < self.full_share <= 1:
            raise ValueError(f"full_share={self.full_share} must be above 0 and at most 1")
        if self.window not in WINDOWS:
            raise ValueError(f"window={self.window!r} must be one of {', '.join(WINDOWS)}")
        if self.pool_tokens < self.max_length:
            raise ValueError(f"pool_tokens={self.pool_tokens} can't hold one request of {self.max_length} tokens")
        if self.window == "refill" and self.num_requests <= self.lanes:
            raise ValueError(f"window=refill: num_requests={self.num_requests} must exceed lanes={self.lanes}")

    @property
    def max_length(self) -> int:
        """Tokens of the longest request."""
        return self.prompt_tokens + round(self.reply_tokens * (1 + self.stagger))


@dataclass(frozen=True)
class Replies:
    """Sampled replies that end by themselves, of the model's default sampling."""

    # of the shipped prompts, or of the user's file
    num_prompts: int
    # longest reply, in tokens
    max_tokens: int
    # replies to each prompt, of each arm and workload, that the sample's size is planned from
    pilot: int = 1
    # looks at the growing sample, 1..4
    looks: int = 3
    # what drawing may take, over all workloads and arms; what ends first ends it undecided
    budget_seconds: float = 300.0
    budget_tokens: int = 100_000_000
    # under the rule `reference` the sample is not planned: so many replies to each prompt
    repetitions: int = 1
    # prompts of the two tests of equality, greedy and coupled
    num_equal: int = 32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be above 0")
        if self.looks > 4:
            raise ValueError(f"looks={self.looks} must be at most 4: each costs power")


@dataclass(frozen=True)
class Texts:
    """Fixed texts, scored by teacher forcing."""

    num_texts: int
    # of each, from its beginning
    max_tokens: int
    # texts that are read at once
    lanes: int = 8

    def __post_init__(self) -> None:
        if min(self.num_texts, self.max_tokens - 1, self.lanes) < 1:
            raise ValueError(f"{self} must have a text, two tokens of it and a lane")


@dataclass(frozen=True)
class Controls:
    """Negative controls: how wrong they are, and what they are tried on."""

    # share of rejected drafts that are accepted anyway
    leak: float
    # one commit in so many leaves the recurrent state behind
    stale_every: int
    num_prompts: int

    def __post_init__(self) -> None:
        if not 0 < self.leak <= 1 or min(self.stale_every, self.num_prompts) < 1:
            raise ValueError(f"{self} must have 0 < leak <= 1 and counts of at least 1")


@dataclass(frozen=True)
class JudgeConfig:
    """Everything the judge measures."""

    solo: Workload
    team: Workload
    busy: Workload
    replies: Replies
    texts: Texts
    controls: Controls
