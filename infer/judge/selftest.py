"""Would the judge notice? Every control, and the honest arm, through the same named tests.

They are the tests of one arm (`gates.martingale_tests`), whether window starts prefer what the head would draft,
equality with plain decoding under the coupled law, and fixed texts on the arm's own path. The last two are exact: in
float32 they hold for every token but near-ties, so that one violation is proof and its absence none. In other dtypes
rows round by how many are computed together; equality is left out there, and texts have to keep below the gate's
ceiling.

Replies are drawn hotter than the model's default: at its sharp law the head is right so often, and what it misses is so
certain, that wrong coins hardly change a token. Top-p below 1 and a temperature other than 1 tell one order of the two
from the other.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from infer.decode import HONEST, Verbs
from infer.judge import gates, replies, texts
from infer.judge.config import JudgeConfig
from infer.judge.controls import Control, controls
from infer.judge.gates import Significance
from infer.judge.record import LIMITS
from infer.judge.replies import Law, Prompt, seed_of
from infer.judge.scoring import DraftScores
from infer.judge.subject import Subject
from infer.judge.texts import Reading, Text
from infer.replies import Reply

# Replies that the stock model scores at once.
SCORED_LANES = 16
# Float32: what two paths to the same log-probability may differ by, with room to spare (`infer.score` says 2e-5).
TEXT_TOLERANCE = 1e-3
# Mean length of the demo model's replies to the shipped prompts at the self-test's sampling, cut at 96 tokens, and how
# many times the tokens that a control should need it is given.
TOKENS_A_REPLY, AMPLE = 43, 1.3
# How the self-test's replies are drawn.
SAMPLING = {"temperature": 1.2, "top_p": 0.9}
# The candidate's law of acceptance where tokens are tested one by one.
VERIFY = "rejection"


class Draw(Protocol):
    """Draws replies of an arm to the self-test's prompts."""

    def __call__(
        self, arm: str, law: Law, repetitions: int, seed: Sequence[object], **changes: Any
    ) -> list[list[Reply]]:
        """`changes` are options of the engine."""


class SelfTest:
    """The sample that all arms are tested on, and the tests."""

    def __init__(
        self, subject: Subject, config: JudgeConfig, prompts: Sequence[Prompt], chosen: Sequence[Text], draw: Draw
    ) -> None:
        self.subject, self.config, self.prompts, self.chosen, self.draw = subject, config, prompts, chosen, draw
        settings = config.controls
        self.law = replace(subject.law, sampling=SAMPLING)
        self.arms = (Control("honest", 0.0, HONEST, "", 0), *controls(settings.leak, settings.stale_every))

    def most_tokens(self, control: Control) -> int:
        """What one arm draws at most."""
        return self.config.controls.num_prompts * (self.repetitions(control) + 1) * self.config.replies.max_tokens

    def repetitions(self, control: Control) -> int:
        """Sampled replies to each prompt: what the control's first test needs; the honest arm takes as many as any."""
        most = max(one.num_tokens for one in self.arms)
        needed = AMPLE * (control.num_tokens if control.strength else most)
        return math.ceil(needed / (self.config.controls.num_prompts * TOKENS_A_REPLY))

    def announcement(self) -> list[str]:
        """How large the sample is and what each control needs, a line each."""
        prompts = self.config.controls.num_prompts
        lines = [f"controls: replies to {prompts} prompts, 1 of each coupled, and {len(self.chosen)} texts"]
        lines += [f"  honest: {self.repetitions(self.arms[0])} sampled replies to each prompt"]
        return lines + [
            f"  {one.name}, strength {one.strength:g}: {self.repetitions(one)} sampled replies to each prompt, "
            f"{one.caught_by} should need about {one.num_tokens:,} tokens"
            for one in self.arms[1:]
        ]

    def run(self, control: Control) -> dict[str, Any]:
        """One arm through all tests: an entry of `raw.controls`."""
        tests, num_tokens = self.one_arm(control)
        if self.exact:
            tests["coupled equality"] = self.equality(control)
        tests["fixed texts"] = self.fixed_texts(control)
        return gates.control(control.name, control.strength, num_tokens, tests)

    @property
    def exact(self) -> bool:
        """Whether rows agree but for the last bits of float32."""
        return self.subject.dtype == "float32"

    def one_arm(self, control: Control) -> tuple[dict[str, Significance], int]:
        """Tests of sampled replies, and how many tokens they rest on."""
        law, verbs, loaded = self.law, control.verbs, self.subject.loaded
        repetitions = self.repetitions(control)
        drawn = self.draw("candidate", law, repetitions, ("control", control.name), verify=VERIFY, verbs=verbs)
        sums = replies.Martingale(self.config.team.num_draft_tokens + 1, seed_of("control", control.name))
        scores = replies.score(loaded, self.prompts, drawn, law, SCORED_LANES)
        drafts = replies.score_drafts(loaded, self.prompts, drawn, law, SCORED_LANES)
        flat = [list(itertools.chain(*x)) for x in (drawn, scores, drafts)]
        for reply, one, _ in zip(*flat, strict=True):
            sums.add(reply, one, VERIFY)
        tests = dict(gates.martingale_tests(sums.record()))
        return tests | preference([reply.steps for reply in flat[0]], flat[2]), int(sums.num_tokens.sum())

    def equality(self, control: Control) -> Significance:
        """Places, other than near-ties, where replies under the coupled law leave plain decoding's."""
        own = self.draw("candidate", self.law, 1, ("equal",), verify="coupled", verbs=control.verbs)
        seeds = [seed_of("equal", prompt.id) for prompt in self.prompts]
        rows = replies.differences(self.subject.loaded, self.prompts, self._plain_replies, own, self.law, seeds)
        _, parted, ties = gates.partings(rows)
        return _proof(parted - ties, 0)

    def fixed_texts(self, control: Control) -> Significance:
        """The largest difference of a log-probability; beyond float32 the mean one."""
        k, lanes = self.config.team.num_draft_tokens, self.config.texts.lanes
        # of the verbs, only this one has a part in reading a text
        verbs = Verbs(commit=control.verbs.commit)
        own = texts.read_in_windows(
            self.subject.loaded, self.chosen, lanes, num_draft_tokens=k, seed=seed_of(control.name), verbs=verbs
        )
        rows = texts.compare(self.chosen, self._plain_readings, own)
        if self.exact:
            return _proof(max(row["max_abs_diff"] for row in rows), TEXT_TOLERANCE)
        total = math.fsum(row["sum_abs_diff"] for row in rows)
        return _proof(total / sum(row["num_tokens"] for row in rows), float(LIMITS["fidelity_ceiling"]))

    @cached_property
    def _plain_replies(self) -> list[list[Reply]]:
        return self.draw("stock", self.law, 1, ("equal",))

    @cached_property
    def _plain_readings(self) -> list[Reading]:
        return texts.read_plainly(self.subject.loaded, self.chosen, self.config.texts.lanes)


def preference(steps: Sequence[Sequence[int]], drafts: Sequence[DraftScores]) -> dict[str, Significance]:
    """Whether tokens at window starts are what the head drafts too often no more, and no less, than by chance.

    Windows behind one that emitted a single token, whose first draft was rejected as a rule, are a test of their own:
    coins that this window shares with the one before are large there and small elsewhere.

    Args:
        steps: tokens of each verify step, by reply; the first token of a reply is no step's.
        drafts: of all tokens, by reply.
    """
    sums = np.zeros((2, 2))
    for counts, scores in zip(steps, drafts, strict=True):
        starts = 1 + np.concatenate([[0], np.cumsum(counts[:-1])]).astype(int) if counts else np.zeros(0, int)
        behind_one = np.concatenate([[0], np.equal(counts[:-1], 1)]).astype(int)[: len(starts)]
        for row, values in zip(sums, (scores.excess, scores.variance), strict=True):
            np.add.at(row, behind_one, values[starts].astype(np.float64))
    z = sums[0] / np.sqrt(np.maximum(sums[1], np.finfo(float).tiny))
    names = ("draft preference, behind several tokens", "draft preference, behind one token")
    return {name: Significance(float(x), math.erfc(abs(x) / math.sqrt(2))) for name, x in zip(names, z, strict=True)}


def _proof(statistic: float, allowed: float) -> Significance:
    """A test without chance."""
    return Significance(float(statistic), 0.0 if statistic > allowed else 1.0)
