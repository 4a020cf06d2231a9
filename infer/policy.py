"""How many drafts pay: k for the next turn, from what steps have cost and what has been accepted.

The rate of k drafts is expected tokens a step over seconds a step. Another k than the best one is tried only as often
as its expected loss stays within a small share of all time: where drafting does not pay, almost nothing is lost.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

# Turns whose cost is remembered for each k; their median is what a step of it costs.
COST_WINDOW = 9
# So many turns of each k come first: of two, the lower cost is the one that nothing disturbed.
FIRST_TURNS = 2
# A position's acceptance is a mean over about so many drafts.
ACCEPTANCE_WINDOW = 2000.0
# Another k has to be better by this share before it takes over: less is noise.
HYSTERESIS = 0.02
# What a turn of another k is taken to lose at least: a smaller difference may be noise.
LEAST_LOSS = 0.05
# Of a position that was never drafted.
UNKNOWN_ACCEPTANCE = 0.6


class DraftPolicy:
    """Chooses k from 0 to `max_num_draft_tokens`; deterministic, given what it has observed."""

    def __init__(self, max_num_draft_tokens: int, probe_cost: float = 0.005) -> None:
        """`probe_cost`: the share of time that trying out other k may lose."""
        self.max_num_draft_tokens, self.probe_cost = max_num_draft_tokens, probe_cost
        ks = range(max_num_draft_tokens + 1)
        self._seconds = [deque[float](maxlen=COST_WINDOW) for _ in ks]
        # of its last turn, and of everything since then
        self._turn = [0.0 for _ in ks]
        self._since = [0.0 for _ in ks]
        # by position, fading: drafts whose predecessors stood, and those of them that stood
        self._tried = [0.0] * max_num_draft_tokens
        self._stood = [0.0] * max_num_draft_tokens
        self._best = 0

    def acceptance(self, position: int) -> float:
        """The chance that the draft at this position stands, given those before it."""
        if self._tried[position] < 1:
            return UNKNOWN_ACCEPTANCE if position == 0 else self.acceptance(position - 1)
        return min(self._stood[position] / self._tried[position], 1.0)

    def expected_length(self, num_draft_tokens: int) -> float:
        """Tokens a step with so many drafts."""
        length, stands = 1.0, 1.0
        for position in range(num_draft_tokens):
            stands *= self.acceptance(position)
            length += stands
        return length

    def cost(self, num_draft_tokens: int) -> float | None:
        """Seconds a step; None if it was not measured often enough."""
        known = self._seconds[num_draft_tokens]
        return median_low(known) if len(known) >= FIRST_TURNS else None

    def rate(self, num_draft_tokens: int) -> float | None:
        """Tokens a second of one lane."""
        cost = self.cost(num_draft_tokens)
        return None if cost is None else self.expected_length(num_draft_tokens) / cost

    def choose(self) -> int:
        """k for the next turn: one that was hardly measured, else the best, else, seldom, another."""
        known: list[float] = []
        for k in range(self.max_num_draft_tokens + 1):
            rate = self.rate(k)
            if rate is None:
                return k
            known.append(rate)
        best = max(range(len(known)), key=known.__getitem__)
        if known[best] > known[self._best] * (1 + HYSTERESIS):
            self._best = best
        others = sorted((k for k in range(len(known)) if k != self._best), key=lambda k: -self._since[k])
        for k in others:
            # each of the others may lose its part of the budget
            lost = max(1 - known[k] / known[self._best], LEAST_LOSS) * self._turn[k]
            if lost < self.probe_cost / self.max_num_draft_tokens * self._since[k]:
                return k
        return self._best

    def observe(
        self, num_draft_tokens: int, seconds: float, num_steps: int, drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Takes in one turn.

        Args:
            num_draft_tokens: k of its program.
            seconds: that it took, of nothing but decoding.
            num_steps: steps it ran; a turn without any says nothing.
            drafted, accepted: by position, of all lanes and steps together.
        """
        if num_steps == 0:
            return
        self._seconds[num_draft_tokens].append(seconds / num_steps)
        self._turn[num_draft_tokens] = seconds
        self._since = [since + seconds for since in self._since]
        self._since[num_draft_tokens] = 0.0
        for position in range(num_draft_tokens):
            tried = drafted[0] if position == 0 else min(accepted[position - 1], drafted[position])
            fade = math.exp(-tried / ACCEPTANCE_WINDOW)
            self._tried[position] = self._tried[position] * fade + tried
            self._stood[position] = self._stood[position] * fade + accepted[position]
