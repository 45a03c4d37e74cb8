"""Which messages are sent together after a connection broke."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from celery_durable.beat import suspects
from celery_durable.beat.suspects import PARTS, Suspects
from celery_durable.messages.delivery import Outgoing
from celery_durable.messages.message import Message

MESSAGE = Message(
    body=b"", content_type="", content_encoding="", headers={}, properties={}, exchange="", routing_key="", queue=None
)


def page(*numbers: int) -> list[Outgoing]:
    return [Outgoing(UUID(int=number), MESSAGE) for number in numbers]


def ids(outgoing: list[Outgoing]) -> list[Any]:
    return [each.timer_id for each in outgoing]


def test_without_suspects_a_page_stays_whole() -> None:
    known = Suspects()
    assert known.batches(page(1, 2, 3), alone=False) == [page(1, 2, 3)]
    assert known.batches(page(1, 2, 3), alone=True) == [page(1), page(2), page(3)]


def test_what_is_above_suspicion_goes_first_and_what_is_suspected_most_last() -> None:
    known = Suspects()
    known.broke(ids(page(*range(16))))
    known.broke(ids(page(0)))
    batches = known.batches(page(0, 1, 2, 3, 50, 51), alone=False)
    assert batches == [page(50, 51), page(1, 2), page(3), page(0)]
    assert known.batches(page(0, 1, 50), alone=True) == [page(50), page(1), page(0)]


def test_of_messages_sent_alone_those_that_never_failed_go_first() -> None:
    """There may be more that break the connection than there is time for."""
    known = Suspects()
    known.broke(ids(page(*range(PARTS))))
    known.broke(ids(page(0)))
    known.came_through(ids(page(90)))
    for number in (0, 1):
        known.broke(ids(page(number)))
    assert known.batches(page(0, 1, 2), alone=False) == [page(2), page(1), page(0)]


def test_a_message_that_came_through_is_suspected_no_more() -> None:
    known = Suspects()
    known.broke(ids(page(1, 2)))
    known.came_through(ids(page(1)))
    assert not known.known(UUID(int=1)) and known.known(UUID(int=2))


def test_failures_count_only_while_others_come_through() -> None:
    """An outage convicts nobody."""
    known = Suspects()
    (lone,) = ids(page(1))
    for _ in range(9):
        known.broke([lone])
    assert known.failures(lone) == 1
    for _ in range(3):
        known.came_through(ids(page(2)))
        known.broke([lone])
        known.broke([lone])
    assert known.failures(lone) == 4
    known.came_through(ids(page(2)))
    known.failed(lone)
    assert known.failures(lone) == 5


def test_a_failure_that_broke_nothing_sends_nobody_into_isolation() -> None:
    known = Suspects()
    known.failed(UUID(int=1))
    assert known.failures(UUID(int=1)) == 1 and not known.known(UUID(int=1))
    assert known.batches(page(1, 2), alone=False) == [page(1, 2)]


def test_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(suspects, "MOST", 3)
    known = Suspects()
    known.broke(ids(page(*range(5))))
    assert [known.known(UUID(int=number)) for number in range(5)] == [False, False, True, True, True]


@given(bad=st.sets(st.integers(0, 499), max_size=3))
def test_the_good_ones_come_through_in_few_rounds(bad: set[int]) -> None:
    """However few break the connection among 500: each round sends all that is left, and parts what broke."""
    known = Suspects()
    left, rounds = set(range(500)), 0
    while left != bad:
        rounds += 1
        assert rounds <= 5
        batches = known.batches(page(*sorted(left)), alone=False)
        assert sorted(each.timer_id for batch in batches for each in batch) == [UUID(int=each) for each in sorted(left)]
        for batch in batches:
            numbers = {UUID(str(each.timer_id)).int for each in batch}
            if numbers & bad:
                known.broke(ids(batch))
            else:
                known.came_through(ids(batch))
                left -= numbers
    assert PARTS**rounds <= 500 * PARTS**2
