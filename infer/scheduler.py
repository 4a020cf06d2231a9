"""Who is answered when, in which lane, on which pages: the engine's bookkeeping, without a device.

Requests wait in the order of their arrival. A request is admitted when a lane is free, the pool has pages for its
prompt, and all live replies can be expected to find theirs; pages are taken as replies grow. When the pool runs dry all
the same, kept prefixes go first, then the newest request is preempted: it gives up lane and pages and waits, in its old
place, to be resumed. The oldest request always gets on, because none is taken that the whole pool could not hold.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from infer.prefix import Entry, PrefixCache, Tokens, common_length

# Of the waiting requests, so many are looked at for a common beginning.
LOOK_AHEAD = 64
# What a reply's length changes of the share that the next are expected to take.
EXAMPLE_WEIGHT = 0.05


class PagePool:
    """Page ids 0..num_pages - 1, each with the number of its holders; a page is free when nobody holds it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))
        self._holders: Counter[int] = Counter()

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages, the lowest ids first. Raises ValueError when there are fewer."""
        if count > self.free:
            raise ValueError(f"{count} pages wanted and {self.free} of {self.num_pages} free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        self._holders.update(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder of each of these pages, which somebody must hold already."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free: it can't be shared")
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder less of each."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is given back and nobody holds it")
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                heapq.heappush(self._free, page)


@dataclass(eq=False)
class Job:
    """One reply to be made."""

    # arrival order
    number: int
    prompt: Tokens
    max_tokens: int
    # None while it waits
    lane: int | None = None
    # in order; the scheduler holds one reference to each for this job
    pages: list[int] = field(default_factory=list)
    # prompt tokens whose reading has been dispatched
    num_read: int = 0
    # tokens of prompt and reply that the host has seen ...
    known: int = 0
    # ... and how many more, at most, the results that it has not seen can hold
    outstanding: int = 0
    # prompt positions at which a snapshot is to be taken, ascending; reading stops at each
    marks: list[int] = field(default_factory=list)
    # of these, tokens that are certain to come, unless the reply ends before
    certain: int = 0
    # whether the choice of its first token has been dispatched
    started: bool = False
    # what preemption kept, to be restored; None if there is nothing to restore
    saved: Any = None
    # results dispatched and not looked at yet: until then it can't be resumed
    unseen: int = 0
    finished: bool = False
    num_preemptions: int = 0
    # prompt tokens that a kept prefix spared it
    num_cached: int = 0

    @property
    def reading(self) -> bool:
        """Whether some of its prompt is still to be dispatched."""
        return self.num_read < len(self.prompt)

    @property
    def limit(self) -> int:
        """The longest it can become."""
        return len(self.prompt) + self.max_tokens

    @property
    def bound(self) -> int:
        """The most tokens, prompt and reply, that it can have by now."""
        return min(self.known + self.outstanding, self.limit)

    @property
    def next_mark(self) -> int:
        """Where the next chunk of the prompt has to end at the latest."""
        return next((mark for mark in self.marks if mark > self.num_read), len(self.prompt))


@dataclass(frozen=True)
class Admission:
    """A job got a lane. The device has to put it there: from `prefix` (whose last page, if shared in part, is to be
    copied: from, to), from what preemption kept (`job.saved`), or empty."""

    job: Job
    prefix: Entry | None = None
    copy: tuple[int, int] | None = None


class Scheduler:
    """Lanes, pool, waiting line and kept prefixes."""

    def __init__(
        self,
        *,
        num_lanes: int,
        num_pages: int,
        page_size: int,
        snapshot_memory: int = 0,
        snapshot_bytes: int = 1,
        snapshot_every: int | None = None,
        snapshot_grid: int = 1,
    ) -> None:
        """`snapshot_grid`: snapshots are taken at multiples of so many tokens only."""
        self.page_size = page_size
        self.snapshot_every, self.snapshot_grid = snapshot_every, snapshot_grid
        self.pool = PagePool(num_pages)
        self.prefixes = PrefixCache(snapshot_memory, snapshot_bytes, self.pool.give_back)
        self.lanes: list[Job | None] = [None] * num_lanes
        # ascending numbers
        self.waiting: list[Job] = []
        self.num_preemptions = 0
        # of their `max_tokens`, what replies take
        self.expected_share = 1.0

    @property
    def live(self) -> list[Job]:
        """Jobs with a lane, the oldest first."""
        return sorted((job for job in self.lanes if job is not None), key=lambda job: job.number)

    @property
    def held_pages(self) -> int:
        """Pages of live jobs, a shared one once."""
        return len({page for job in self.live for page in job.pages})

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.page_size)

    def submit(self, job: Job) -> None:
        """Puts a job in line.

        Raises:
            ValueError: the pool could not hold it even alone.
        """
        need, have = self.pages_for(job.limit), self.pool.num_pages
        if need > have:
            raise ValueError(
                f"a prompt of {len(job.prompt)} tokens and a reply of up to {job.max_tokens} need {need} pages of "
                f"{self.page_size} and the pool has {have}; ask for fewer tokens or make the pool larger"
            )
        job.known = len(job.prompt)
        self._insert(job)

    def admit(self, room: int) -> Iterator[Admission]:
        """Gives lanes to waiting jobs in their order, as far as lanes and pages go.

        Args:
            room: tokens behind the prompt, or behind what it had, that a job needs pages for at once.
        """
        for job in list(self.waiting):
            if None not in self.lanes:
                return
            if job.unseen or (job.saved is None and self._expects_prefix(job)):
                continue
            admission = self._place(job, room)
            if admission is None:
                return
            self.waiting.remove(job)
            yield admission

    def grow(self, job: Job, tokens: int) -> Job | None:
        """Gives a live job the pages for `bound + tokens`, or up to its limit.

        Returns None when it has them. Else the pool is dry: returns the newest live job, perhaps this one, for the
        caller to preempt (see `park`) before it asks again.
        """
        need = self.pages_for(min(job.bound + tokens, job.limit)) - len(job.pages)
        while need > self.pool.free and self.prefixes.evict():
            pass
        if need > self.pool.free:
            return self.live[-1]
        job.pages += self.pool.take(max(0, need))
        return None

    def park(self, job: Job, saved: Any) -> None:
        """Takes lane and pages from a preempted job and puts it back in line with what has been kept of it."""
        self._vacate(job)
        job.saved = saved
        job.num_preemptions += 1
        self.num_preemptions += 1
        self._insert(job)

    def finish(self, job: Job, of_itself: bool = False) -> None:
        """Ends a job wherever it is and takes back what it holds; nothing happens to one that has ended.

        Args:
            of_itself: by its own end, and so an example of how long replies become.
        """
        if job.finished:
            return
        if of_itself:
            share = (job.known - len(job.prompt)) / job.max_tokens
            self.expected_share += EXAMPLE_WEIGHT * (share - self.expected_share)
        job.finished = True
        job.saved = None
        if job in self.waiting:
            self.waiting.remove(job)
        self._vacate(job)

    def keep_prefix(self, job: Job, snapshot: Any) -> Entry | None:
        """Keeps a snapshot of what the job has read of its prompt so far."""
        pages = job.pages[: self.pages_for(job.num_read)]
        self.pool.share(pages)
        entry = self.prefixes.add(job.prompt[: job.num_read], pages, snapshot)
        if entry is None:
            job.marks.remove(job.num_read)
        return entry

    def settle_prefix(self, job: Job, entry: Entry, finite: bool) -> None:
        """Lets others build on a kept prefix, or forgets one whose values are not finite."""
        entry.ready = finite
        if not finite:
            self.prefixes.drop(entry)
        job.marks.remove(len(entry.tokens))

    def _insert(self, job: Job) -> None:
        index = next((i for i, other in enumerate(self.waiting) if other.number > job.number), len(self.waiting))
        self.waiting.insert(index, job)

    def _vacate(self, job: Job) -> None:
        if job.lane is not None:
            self.lanes[job.lane] = None
            job.lane = None
        self.pool.give_back(job.pages)
        job.pages = []

    def _peak(self, jobs: Iterable[Job], room: int) -> int:
        """The most pages that jobs hold together on their way, if all grow at one rate and end where they are expected
        to: the most of what they hold just before each of those ends."""
        growing = sorted(
            ((int(self.expected_share * (job.limit - job.bound)), job) for job in jobs), key=lambda x: -x[0]
        )
        peak = held = 0
        for number, (left, job) in enumerate(growing, 1):
            held += job.bound - job.num_cached
            # the last page of each is half empty, and each is given room for its next turn
            peak = max(peak, self.pages_for(held + number * (left + room)) + number // 2)
        return peak

    def _place(self, job: Job, room: int) -> Admission | None:
        """Lane and pages for one job, or None if the pool has too few."""
        entry = self.prefixes.find(job.prompt) if job.saved is None else None
        total = self.pages_for(min(job.bound + room, job.limit))
        shared = [] if entry is None else list(entry.pages[: len(entry.tokens) // self.page_size])
        # the prefix must survive the evictions that make room for its own user
        self.pool.share(shared)
        source = [] if entry is None else list(entry.pages[len(shared) :])
        self.pool.share(source)
        live = self.live
        while self.pool.free < total - len(shared) and self.prefixes.evict(keep=entry):
            pass
        fits = self.pool.free >= total - len(shared)
        # a crowd that outgrows the pool would be admitted only to be preempted
        if not fits or (live and self._peak([*live, job], room) > self.pool.num_pages):
            self.pool.give_back(shared + source)
            if entry is None or live or fits:
                return None
            # alone, and the prefix's own last page is in the way
            self.prefixes.drop(entry)
            return self._place(job, room)
        job.pages = shared + self.pool.take(total - len(shared))
        self.pool.give_back(source)
        job.lane = self.lanes.index(None)
        self.lanes[job.lane] = job
        if job.saved is None:
            job.num_read = job.num_cached = 0 if entry is None else len(entry.tokens)
            job.marks = self._marks(job)
        return Admission(job, entry, (source[0], job.pages[len(shared)]) if source else None)

    def _marks(self, job: Job) -> list[int]:
        """Where to take snapshots: at the prompt's end, where another prompt parts from it, every so often if asked."""
        if self.prefixes.capacity == 0:
            return []
        length = len(job.prompt)
        every = self.snapshot_every or length
        marks = {length, *range(every, length, every)} | self.prefixes.branch_points(job.prompt)
        marks |= {common_length(job.prompt, other.prompt) for other in self.waiting[:LOOK_AHEAD] if other is not job}
        marks = {mark - mark % self.snapshot_grid for mark in marks}
        fresh = (m for m in marks if m > job.num_read and not self.prefixes.holds(job.prompt[:m]))
        return sorted(m for m in fresh if m == length or m >= self.page_size)

    def _expects_prefix(self, job: Job) -> bool:
        """Whether a live job is about to leave a longer prefix of this prompt than there is: worth a moment's wait."""
        entry = self.prefixes.find(job.prompt)
        known = 0 if entry is None else len(entry.tokens)
        for other in self.live:
            shared = common_length(job.prompt, other.prompt)
            if any(known < mark <= shared for mark in other.marks):
                return True
        return False
