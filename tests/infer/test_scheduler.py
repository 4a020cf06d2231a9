"""The engine's bookkeeping without a device: order, pages, preemption, prefixes, and ten thousand random events."""

import numpy as np
import pytest

from infer.prefix import PrefixCache, common_length
from infer.scheduler import Admission, Job, PagePool, Scheduler

PAGE = 4


def make(num_lanes: int = 2, num_pages: int = 8, snapshots: int = 0, every: int | None = None) -> Scheduler:
    return Scheduler(
        num_lanes=num_lanes,
        num_pages=num_pages,
        page_size=PAGE,
        snapshot_memory=snapshots,
        snapshot_bytes=1,
        snapshot_every=every,
    )


def job(number: int, prompt: int | list[int] = 4, max_tokens: int = 4) -> Job:
    tokens = list(range(100 * number, 100 * number + prompt)) if isinstance(prompt, int) else prompt
    return Job(number, np.array(tokens, np.int32), max_tokens)


def admit(scheduler: Scheduler, room: int = 1) -> list[Admission]:
    return list(scheduler.admit(room))


def read(scheduler: Scheduler, reading: Job, finite: bool = True) -> None:
    """Reads the whole prompt, with the snapshots that are asked for on the way."""
    while reading.reading:
        reading.num_read = reading.next_mark
        if reading.num_read in reading.marks:
            entry = scheduler.keep_prefix(reading, f"state at {reading.num_read}")
            if entry is not None:
                scheduler.settle_prefix(reading, entry, finite)


def held(scheduler: Scheduler) -> int:
    return scheduler.pool.num_pages - scheduler.pool.free


def test_pages_are_counted_by_holder() -> None:
    pool = PagePool(4)
    pages = pool.take(3)
    assert pages == [0, 1, 2] and pool.free == 1
    pool.share(pages[:1])
    pool.give_back(pages)
    assert pool.free == 3
    pool.give_back(pages[:1])
    assert pool.free == 4 and pool.take(4) == [0, 1, 2, 3]
    for wrong in (lambda: pool.take(1), lambda: PagePool(2).give_back([0]), lambda: PagePool(2).share([1])):
        with pytest.raises(ValueError, match="page"):
            wrong()


def test_a_request_the_pool_can_never_hold_is_refused_with_the_numbers() -> None:
    scheduler = make(num_pages=8)
    with pytest.raises(ValueError, match=r"prompt of 20 tokens .* up to 13 need 9 pages of 4 and the pool has 8"):
        scheduler.submit(job(0, 20, 13))
    scheduler.submit(job(1, 20, 12))
    assert len(admit(scheduler)) == 1


def test_order_of_arrival_and_no_overcommitment() -> None:
    scheduler = make(num_lanes=3, num_pages=9)
    big, small = job(1, 16, 4), job(2, 4, 4)
    for one in (job(0, 12, 4), big, small):
        scheduler.submit(one)
    # the second does not fit beside the first, and the third, which would, does not overtake it
    assert [a.job.number for a in admit(scheduler)] == [0]
    assert scheduler.waiting == [big, small]
    scheduler.finish(scheduler.live[0])
    assert [a.job.number for a in admit(scheduler)] == [1, 2]
    assert held(scheduler) <= 9 and scheduler.held_pages == held(scheduler)


def test_a_dry_pool_preempts_the_newest_which_then_keeps_its_place() -> None:
    scheduler = make(num_lanes=3, num_pages=8)
    # replies so far were short, these are not
    scheduler.expected_share = 0.0
    old, new, later = job(0, 4, 24), job(1, 4, 24), job(2, 4, 4)
    for one in (old, new):
        scheduler.submit(one)
    assert len(admit(scheduler)) == 2
    for one in (old, new):
        one.known += 12
        assert scheduler.grow(one, 0) is None
    scheduler.submit(later)
    assert admit(scheduler) == []
    old.known += 4
    victim = scheduler.grow(old, 0)
    assert victim is new
    scheduler.park(new, "what it had")
    assert scheduler.grow(old, 0) is None
    # it is older than the one that waits, so that one lets it go first, even if it would fit itself
    assert scheduler.waiting == [new, later] and new.num_preemptions == 1
    assert admit(scheduler) == []
    scheduler.finish(old)
    first = admit(scheduler)[0]
    assert first.job is new and new.saved == "what it had" and len(new.pages) >= 4


@pytest.mark.parametrize("stagger", [0, 20])
def test_nobody_is_preempted_while_replies_are_as_long_as_expected(stagger: int) -> None:
    scheduler = make(num_lanes=12, num_pages=64)
    for number in range(40):
        scheduler.submit(job(number, 8, 32 + stagger * (number % 3 - 1)))
    fullest, most = 0, 0
    while scheduler.waiting or scheduler.live:
        admit(scheduler, room=2)
        for one in scheduler.live:
            assert scheduler.grow(one, 2) is None
            one.known += 1
            if one.known == one.limit:
                scheduler.finish(one, of_itself=True)
        fullest, most = max(fullest, held(scheduler)), max(most, len(scheduler.live))
    # and yet the pool is used: it could not hold so many at their full length
    assert fullest > 0.85 * 64 and most >= 64 // 10
    assert scheduler.expected_share == pytest.approx(1.0)


def test_how_long_replies_are_expected_to_be_follows_those_that_end_of_themselves() -> None:
    scheduler = make(num_lanes=1)
    for number in range(200):
        scheduler.submit(job(number, 4, 20))
        one = admit(scheduler)[0].job
        one.known += 5
        scheduler.finish(one, of_itself=number < 100)
    assert scheduler.expected_share == pytest.approx(0.25, abs=0.01)


def test_a_job_with_results_under_way_is_not_resumed_before_they_are_seen() -> None:
    scheduler = make()
    one = job(0)
    scheduler.submit(one)
    assert admit(scheduler)
    one.unseen = 1
    scheduler.park(one, "state")
    assert admit(scheduler) == []
    one.unseen = 0
    assert admit(scheduler)[0].job is one


def test_a_shared_prefix_is_read_once_even_when_its_continuations_part_at_the_next_token() -> None:
    scheduler = make(num_lanes=4, num_pages=32, snapshots=8)
    shared = list(range(10))
    jobs = [job(n, [*shared, 50 + n, 60]) for n in range(3)]
    for one in jobs:
        scheduler.submit(one)
    # the others wait for the first, which will leave a snapshot where they part
    assert [a.job for a in admit(scheduler)] == jobs[:1]
    assert jobs[0].marks == [10, 12]
    read(scheduler, jobs[0])
    second, third = admit(scheduler)
    for admission in (second, third):
        assert admission.prefix is not None and admission.job.num_read == 10 == admission.job.num_cached
        source, target = admission.copy or (-1, -1)
        # two whole pages are shared, the third is its own copy
        assert admission.job.pages[:2] == jobs[0].pages[:2]
        assert source == jobs[0].pages[2] and target == admission.job.pages[2] != source
    # its own prompt again: nothing is left to read
    again = job(9, [*shared, 50, 60])
    scheduler.submit(again)
    assert admit(scheduler)[0].prefix is not None and not again.reading


def test_a_prefix_that_is_not_finite_is_forgotten() -> None:
    scheduler = make(num_lanes=1, num_pages=8, snapshots=8)
    scheduler.submit(job(0, [1] * 8))
    first = admit(scheduler)[0].job
    read(scheduler, first, finite=False)
    scheduler.finish(first)
    assert len(scheduler.prefixes) == 0 and held(scheduler) == 0
    scheduler.submit(job(1, [1] * 8))
    assert admit(scheduler)[0].prefix is None


def test_kept_prefixes_yield_to_requests_least_recently_used_first() -> None:
    scheduler = make(num_lanes=1, num_pages=6, snapshots=8)
    for number in range(2):
        scheduler.submit(job(number, 8, 4))
        one = admit(scheduler)[0].job
        read(scheduler, one)
        scheduler.finish(one)
    assert held(scheduler) == 4 and len(scheduler.prefixes) == 2
    # uses the first, so that the second goes
    scheduler.submit(job(0, 8, 4))
    scheduler.finish(admit(scheduler)[0].job)
    scheduler.submit(job(5, 12, 4))
    assert admit(scheduler, room=4)[0].job.number == 5
    assert scheduler.prefixes.find(job(0, 8).prompt) is not None
    assert scheduler.prefixes.find(job(1, 8).prompt) is None


def test_a_prefix_that_is_in_the_way_of_its_own_user_goes() -> None:
    scheduler = make(num_lanes=1, num_pages=4, snapshots=8)
    scheduler.submit(job(0, 6, 4))
    first = admit(scheduler)[0].job
    read(scheduler, first)
    scheduler.finish(first)
    # a whole page to share, a part of one to copy, and three of its own: one more than there are
    scheduler.submit(job(0, 6, 10))
    admission = admit(scheduler, room=10)[0]
    assert admission.prefix is None and len(admission.job.pages) == 4 == held(scheduler)


def test_the_budget_of_snapshots_is_in_bytes() -> None:
    given: list[int] = []
    cache = PrefixCache(budget=2500, entry_bytes=1000, give_back=given.extend)
    for n in range(3):
        assert cache.add(np.full((4,), n, np.int32), [n], n) is not None
    assert len(cache) == 2 and given == [0]
    assert PrefixCache(999, 1000, given.extend).add(np.zeros((4,), np.int32), [7], None) is None and given == [0, 7]
    assert common_length(np.array([1, 2, 3]), np.array([1, 2, 4])) == 2


def test_fault_22_ten_thousand_random_events_leave_pool_and_lanes_as_they_began() -> None:
    """vllm and sglang leaked slots when an admission failed or a request left at an odd moment."""
    rng = np.random.default_rng(3)
    scheduler = make(num_lanes=4, num_pages=24, snapshots=3, every=8)
    # it hopes for the best, so that the pool runs dry now and then
    scheduler.expected_share = 0.0
    alive: list[Job] = []
    seen = {"preempted": 0, "hit": 0, "refused": 0}
    families = [rng.integers(0, 50, 24).tolist() for _ in range(4)]
    for number in range(10_000):
        event = rng.integers(0, 10)
        if event < 4:
            cut = int(rng.integers(1, 25))
            tokens = [*families[rng.integers(4)][:cut], *rng.integers(50, 99, rng.integers(0, 12)).tolist()]
            one = job(number, tokens, int(rng.integers(1, 80)))
            try:
                scheduler.submit(one)
                alive.append(one)
            except ValueError:
                seen["refused"] += 1
        elif event < 7:
            for admission in scheduler.admit(int(rng.integers(1, 6))):
                seen["hit"] += admission.prefix is not None
                admission.job.saved = None
        if event in (5, 6, 7):
            for one in scheduler.live:
                if one.reading:
                    read(scheduler, one, finite=bool(rng.integers(0, 8)))
                one.known = min(one.known + int(rng.integers(0, 5)), one.limit)
                while one.lane is not None and (victim := scheduler.grow(one, 2)) is not None:
                    scheduler.park(victim, "state")
                    seen["preempted"] += 1
        if event >= 8 and alive:
            gone = alive.pop(int(rng.integers(len(alive))))
            scheduler.finish(gone)
            scheduler.finish(gone)
        for one in scheduler.live:
            assert scheduler.lanes[one.lane or 0] is one
            assert len(one.pages) >= scheduler.pages_for(min(one.known, one.limit)) and len(set(one.pages)) == len(
                one.pages
            )
        entries = {page for entry in scheduler.prefixes._entries.values() for page in entry.pages}
        assert len(entries | {page for one in scheduler.live for page in one.pages}) == held(scheduler)
        if len(alive) > 40:
            scheduler.finish(alive.pop(0))
    assert min(seen.values()) > 50
    for one in alive:
        scheduler.finish(one)
    scheduler.prefixes.clear()
    assert scheduler.lanes == [None] * 4 and scheduler.waiting == []
    assert sorted(scheduler.pool._free) == list(range(24)) and not scheduler.pool._holders
