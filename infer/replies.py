"""What the engine hands out, and how a reply grows on the host: tokens come in step by step, text, log-probabilities
and counts of drafts follow, and everything ends at the same token wherever the end was found.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from infer.params import SamplingParams
from infer.scheduler import Job
from infer.tokenizer import TextStream


@dataclass(frozen=True)
class TokenLogProb:
    """Log-probabilities under the target's own law (nats, before any sampling parameter) where one token was chosen."""

    token: int
    log_prob: float
    # the most probable tokens there, best first
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Reply:
    """One reply. Text, tokens, log-probabilities and counts all end at the same token."""

    text: str
    # an end token is the last; of a stop string only the token in whose middle it begins is left
    token_ids: tuple[int, ...]
    # "stop" (end token or stop string), "length", "abort" or "error"
    finish_reason: str
    # what went wrong, if the reason is "error"
    error: str | None
    # one a token if asked for
    log_probs: tuple[TokenLogProb, ...] | None
    prompt_tokens: int
    # prompt tokens that a kept prefix spared
    cached_tokens: int
    # tokens that each verify step emitted; the first token comes from the prompt's last row and counts for none
    steps: tuple[int, ...]
    # by position in the window: how often it was drafted, and emitted as accepted
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    # waiting for a lane; from there to the first token; from there to the end, as the host saw them
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    num_preemptions: int

    @property
    def num_verify_steps(self) -> int:
        """Passes of the target that emitted tokens of this reply."""
        return len(self.steps)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a verify step; None without steps."""
        return sum(self.steps) / len(self.steps) if self.steps else None


@dataclass(frozen=True)
class Result:
    """The answer to one prompt."""

    prompt_token_ids: tuple[int, ...]
    # `n` of them
    replies: tuple[Reply, ...]

    @property
    def reply(self) -> Reply:
        """The first, and for n = 1 the only one."""
        return self.replies[0]


@dataclass(frozen=True)
class Delta:
    """What a reply has gained: the tokens of one or more steps, and the text they complete."""

    request_id: int
    # which of the request's n replies
    sample: int
    token_ids: tuple[int, ...]
    text: str
    # set in the last one
    finish_reason: str | None


@dataclass(frozen=True)
class Step:
    """What one step emitted of one reply."""

    tokens: Sequence[int]
    num_drafted: int
    num_accepted: int
    # raw, of each token; empty unless asked for
    log_probs: Sequence[TokenLogProb] = ()


@dataclass
class Work:
    """One reply under way."""

    request_id: int
    sample: int
    params: SamplingParams
    job: Job
    # None in an engine without a tokenizer
    stream: TextStream | None
    # positions of a window
    num_draft_tokens: int
    # where its deltas go
    deltas: deque[Delta]
    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    token_ids: list[int] = field(default_factory=list)
    # the first is the prompt's own
    steps: list[Step] = field(default_factory=list)
    # tokens handed out in deltas
    num_shown: int = 0
    finish_reason: str | None = None
    reply: Reply | None = None

    def push(self, step: Step) -> str:
        """Takes one step's tokens; returns the text that they complete."""
        self.steps.append(step)
        self.token_ids += step.tokens
        return "" if self.stream is None else self.stream.push(step.tokens)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self.stream is not None and self.stream.stopped

    def delta(self, text: str) -> Delta | None:
        """What can be handed out now; None if it is nothing. Tokens whose text a stop string may still cut wait."""
        whole = self.stream is None or not self.stream.stop or self.finish_reason is not None
        end = len(self.token_ids) if whole or self.stream is None else self.stream.num_shown
        tokens = tuple(self.token_ids[self.num_shown : end])
        self.num_shown = max(self.num_shown, end)
        if not tokens and not text and self.finish_reason is None:
            return None
        return Delta(self.request_id, self.sample, tokens, text, self.finish_reason)

    def finish(self, reason: str, now: float, error: str | None = None) -> str:
        """Ends it; returns the text that was held back. Steps, and parts of one, behind a stop string don't count."""
        rest = "" if self.stream is None else self.stream.finish()
        self.finish_reason = reason
        if self.stream is not None:
            self.token_ids = self.token_ids[: self.stream.num_tokens]
        left = len(self.token_ids)
        kept: list[tuple[int, Step]] = []
        for step in self.steps:
            if left <= 0:
                break
            kept.append((min(left, len(step.tokens)), step))
            left -= len(step.tokens)
        position = np.arange(self.num_draft_tokens)
        verify = kept[1:]
        drafted = sum((position < step.num_drafted for _, step in verify), np.zeros(len(position), int))
        accepted = sum(
            (position < min(count, step.num_accepted) for count, step in verify), np.zeros(len(position), int)
        )
        log_probs = None
        if self.params.logprobs is not None:
            log_probs = tuple(one for count, step in kept for one in step.log_probs[:count])
        started, first = self.admitted or now, self.first_token or now
        self.reply = Reply(
            text="" if self.stream is None else self.stream.text,
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            error=error,
            log_probs=log_probs,
            prompt_tokens=len(self.job.prompt),
            cached_tokens=self.job.num_cached,
            steps=tuple(count for count, _ in verify),
            drafted=tuple(int(x) for x in drafted),
            accepted=tuple(int(x) for x in accepted),
            queue_seconds=started - self.submitted,
            prefill_seconds=first - started,
            decode_seconds=now - first,
            num_preemptions=self.job.num_preemptions,
        )
        return rest
