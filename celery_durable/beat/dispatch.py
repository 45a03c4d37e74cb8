"""Due timers on their way to the broker: claim a page, publish it, mark what the broker confirmed.

No transaction is open while a page is published.  While one page is published
the next is claimed and the one before is marked, on the connection's other
thread; that happens only while full pages come, so a single timer costs two
statements and no hand-over.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from random import sample
from typing import TYPE_CHECKING
from uuid import UUID

from celery.utils.log import get_logger

from celery_durable import signals
from celery_durable.beat.link import Link
from celery_durable.beat.suspects import Suspects
from celery_durable.core.pacing import Clock, Outage, Watermark, pause_of_returned
from celery_durable.errors import DurableError
from celery_durable.messages.delivery import BrokerUnavailable, Delivery, Outcome, Outgoing, Publisher
from celery_durable.messages.message import Message
from celery_durable.settings import Settings
from celery_durable.store import claims
from celery_durable.store.claims import Claim
from celery_durable.store.executor import Executor

if TYPE_CHECKING:
    from celery import Celery

logger = get_logger(__name__)

#: Longest stretch of dispatching before sweeps and occurrences get their turn, in seconds.
STRETCH = 1.0
#: Least seconds between two warnings about messages that the broker gives back.
QUIET = 60.0
#: Seconds after which a message that fails alone again and again, while others come through, is a dead letter.
LONG_FAILING = 86_400.0
#: Failures of a message by itself, while others came through, after which it is tried less and less often, and those
#: after which it may be given up.
REPEATED, CONVINCING = 2, 5
#: Forgotten messages that serve as probes together: one of them alone may be why the broker seems to be away.
PROBES = 8


class Undispatchable(DurableError):
    """The stored message is not one."""


@dataclass
class Page:
    """Claims on their way, and what became of them."""

    claims: list[Claim]
    held: int
    """Rows that the statement took: those that had expired were ended by it."""
    claimed_at: float
    """Monotonic seconds, before the statement."""
    confirmed: list[Claim] = field(default_factory=list)
    returned: list[tuple[Claim, float]] = field(default_factory=list)
    """To be tried again, after so many seconds."""
    bad: list[tuple[Claim, Exception]] = field(default_factory=list)


class Dispatcher:
    """Takes due timers to the broker.

    A page that could not be published at all is let go of for a short time.
    After that, until the broker is back, one timer at a time serves as probe.

    Arguments:
        app: sends the signals.
        link: the beat's connection.
        publisher: to the broker.
        settings: page size and time limits.
        outage: the broker's.
        clock: the database's clock.
    """

    def __init__(
        self, app: Celery, link: Link, publisher: Publisher, settings: Settings, outage: Outage, clock: Clock
    ) -> None:
        self._app = app
        self._link = link
        self._publisher = publisher
        self._settings = settings
        self._outage = outage
        self._clock = clock
        self._suspects = Suspects()
        self._warned_at = float("-inf")
        #: Timers marked since the last look at it.
        self.dispatched = 0

    @property
    def page(self) -> int:
        """How many timers to take at once."""
        return 1 if self._outage.active else self._settings.page

    def drain(self, shard: int, watermark: Watermark, ending: Sequence[int] = ()) -> bool:
        """Dispatch what is due in one shard, for at most :data:`STRETCH` seconds.

        Arguments:
            shard: which.
            watermark: its lower bound.
            ending: stop after the page in hand when this is no longer empty.

        Returns:
            Whether there may be more.

        Raises:
            BrokerUnavailable: the broker is away.
            DatabaseUnavailable: Postgres is away.
        """
        until = time.monotonic() + STRETCH
        size = self.page
        page = self._link.run(lambda executor: self._claim(executor, shard, watermark, size))
        settled: Future[None] | None = None
        try:
            while page.held >= size == self._settings.page and time.monotonic() < until and not ending:
                ahead = self._link.start(partial(self._claim, shard=shard, watermark=watermark, size=size))
                try:
                    self._publish(page)
                except BrokerUnavailable:
                    self._let_go(page)
                    self._let_go(ahead.result())
                    raise
                # Started before the claim is looked at: what was sent is marked, whatever has become of that.
                before, settled = settled, self._link.start(partial(self._settle, page=page))
                if before is not None:
                    before.result()
                page = ahead.result()
                if self._outage.active:
                    self._let_go(page)
                    page = Page(claims=[], held=0, claimed_at=0.0)
            more = page.held >= size
            self._serve(page)
        finally:
            if settled is not None:
                settled.result()
        return more

    def again(self, ids: Sequence[UUID]) -> int:
        """Claim and dispatch runs that nobody followed up; returns how many."""
        started = time.monotonic()
        taken = sample(ids, min(PROBES, len(ids))) if self._outage.active else ids[: self.page]
        found = self._link.run(lambda executor: claims.reclaim(executor, taken, timeout=self._settings.claim_timeout))
        self._serve(Page(claims=found, held=len(found), claimed_at=started))
        return len(found)

    def _claim(self, executor: Executor, shard: int, watermark: Watermark, size: int) -> Page:
        started = time.monotonic()
        bound = watermark.begin(started)
        found, held, last = claims.claim(
            executor, shard=shard, watermark=claims.UNBOUNDED if bound is None else bound, page=size,
            timeout=self._settings.claim_timeout,
        )  # fmt: skip
        if held < size:
            watermark.emptied(self._clock.at(started))
        elif last is not None and isfinite(last):
            watermark.filled(last)
        return Page(claims=found, held=held, claimed_at=started)

    def _serve(self, page: Page) -> None:
        if not page.claims:
            return
        try:
            self._publish(page)
        except BrokerUnavailable:
            self._let_go(page)
            raise
        self._link.run(lambda executor: self._settle(executor, page))

    def _publish(self, page: Page) -> None:
        """Publish a page, and sort it by what became of each.

        Raises:
            BrokerUnavailable: nothing was sent, or nothing came through.
        """
        outgoing, by_id = self._outgoing(page)
        if not outgoing:
            return
        until = page.claimed_at + self._settings.publish_timeout
        batches = self._suspects.batches(outgoing, alone=self._outage.active)
        number = len(batches)
        while batches:
            try:
                deliveries = self._publisher.publish(batches[0])
            except BrokerUnavailable as exc:
                if len(batches) == number:
                    raise
                self._failed(str(exc))
                break
            del batches[0]
            self._sort(page, by_id, deliveries)
            # Suspects that break one connection after the other must not take the time of others.
            if time.monotonic() >= until:
                break
        pause = self._short_pause()
        page.returned += [(by_id[each.timer_id], pause) for batch in batches for each in batch]

    def _outgoing(self, page: Page) -> tuple[list[Outgoing], dict[object, Claim]]:
        """What of a page can be published, and the claims by their timers."""
        by_id: dict[object, Claim] = {}
        outgoing: list[Outgoing] = []
        waited = time.monotonic() - page.claimed_at
        for claim in page.claims:
            expires_in = claim.expires_in
            if expires_in is not None:
                expires_in = expires_in - waited if isfinite(expires_in) else None
                if expires_in is not None and expires_in <= 0:
                    continue  # the sweep ends it
            try:
                message = read(claim)
            except (ValueError, Undispatchable) as exc:
                page.bad.append((claim, exc))
                continue
            by_id[claim.id] = claim
            outgoing.append(Outgoing(claim.id, message, expires_in))
        return outgoing, by_id

    def _sort(self, page: Page, by_id: dict[object, Claim], deliveries: Sequence[Delivery]) -> None:
        confirmed: list[Claim] = []
        unclear: list[Delivery] = []
        reasons: Counter[str] = Counter()
        for delivery in deliveries:
            claim = by_id[delivery.timer_id]
            if delivery.outcome is Outcome.CONFIRMED:
                confirmed.append(claim)
            elif delivery.outcome is Outcome.UNCERTAIN:
                unclear.append(delivery)
            elif delivery.outcome is Outcome.REFUSED:
                page.bad.append((claim, Undispatchable(delivery.reason)))
            else:
                if delivery.outcome is Outcome.FAILED:
                    self._suspects.failed(claim.id)
                reasons[delivery.reason] += self._again_later(page, claim, delivery)
        page.confirmed += confirmed
        self._suspects.came_through([each.id for each in confirmed])
        if unclear:
            self._unclear(page, by_id, unclear, alone=len(deliveries) == 1, working=bool(confirmed))
        else:
            self._worked()
        if +reasons:
            self._warn(reasons)

    def _unclear(
        self, page: Page, by_id: dict[object, Claim], unclear: Sequence[Delivery], *, alone: bool, working: bool
    ) -> None:
        """Note messages that the broker may have or not: most are published again when their claims expire."""
        reason = unclear[-1].reason or "no word from the broker"
        suspected = all(self._suspects.known(each.timer_id) for each in unclear)
        self._suspects.broke([each.timer_id for each in unclear])
        claim = by_id[unclear[-1].timer_id]
        if alone and self._suspects.failures(claim.id) >= REPEATED and self._again_later(page, claim, unclear[-1]):
            self._warn(Counter({f"{reason} (each time that timer {claim.id}, {claim.task}, is sent by itself)": 1}))
        if working:
            self._worked()
        elif self._outage.active or not suspected:
            # Of suspects alone nobody could tell whether the broker is away.
            self._failed(reason)

    def _again_later(self, page: Page, claim: Claim, delivery: Delivery) -> bool:
        """Let go of a message that failed; False: it has so long, while others came through, that it is given up."""
        late = self._late(claim)
        convinced = self._suspects.failures(claim.id) >= CONVINCING and delivery.outcome is not Outcome.RETURNED
        if convinced and late > LONG_FAILING:
            page.bad.append((claim, Undispatchable(delivery.reason)))
            return False
        pause = pause_of_returned(late, most=self._settings.redispatch_after)
        if delivery.outcome is Outcome.UNCERTAIN:
            # The broker may have it: no sooner than other claims of which nothing is known.
            pause = max(pause, self._settings.claim_timeout)
        page.returned.append((claim, pause))
        return True

    def _settle(self, executor: Executor, page: Page) -> None:
        if page.confirmed:
            lateness = claims.mark(
                executor, page.confirmed, redispatch_after=self._settings.redispatch_after,
                redispatch_max=self._settings.redispatch_max,
            )  # fmt: skip
            self.dispatched += len(lateness)
            if signals.timer_dispatched.receivers:
                self._tell_dispatched(page.confirmed, lateness)
            if logger.isEnabledFor(logging.DEBUG):
                for claim in page.confirmed:
                    logger.debug("%s sent. id->%s", claim.task, claim.id)
        by_pause: dict[float, list[Claim]] = {}
        for claim, pause in page.returned:
            by_pause.setdefault(pause, []).append(claim)
        for pause, returned in by_pause.items():
            claims.release(executor, returned, pause=pause)
        for claim, error in page.bad:
            if claims.quarantine(executor, claim, error):
                logger.error("Timer %s (%s) can never be published, it is dead now: %s", claim.id, claim.task, error)
                signals.timer_dead.send(
                    self._app, timer_id=claim.id, task=claim.task, reason="undispatchable", error=str(error)
                )

    def _tell_dispatched(self, confirmed: Sequence[Claim], lateness: Mapping[UUID, float]) -> None:
        for claim in confirmed:
            if claim.id in lateness:
                signals.timer_dispatched.send(
                    self._app, timer_id=claim.id, task=claim.task, lateness=lateness[claim.id], leased=claim.leased
                )

    def _late(self, claim: Claim) -> float:
        """Seconds since it was due."""
        return self._clock.at(time.monotonic()) - (claim.due_at if isfinite(claim.due_at) else 0.0)

    def _let_go(self, page: Page) -> None:
        pause = self._short_pause()
        self._link.run(lambda executor: claims.release(executor, page.claims, pause=pause))

    def _short_pause(self) -> float:
        """Seconds until what was not sent at all may be tried again."""
        return max(self._outage.remaining(time.monotonic()), 0.1)

    def _failed(self, reason: str) -> None:
        if self._outage.failed(time.monotonic()):
            logger.error("The broker does not take messages, due timers wait in Postgres: %s", reason)

    def broker_failed(self, error: BrokerUnavailable) -> None:
        """Note that the broker is away."""
        self._failed(str(error))

    def _worked(self) -> None:
        away = self._outage.worked(time.monotonic())
        if away is not None:
            logger.warning("The broker takes messages again after %.1f s.", away)

    def _warn(self, reasons: Counter[str]) -> None:
        now = time.monotonic()
        if now - self._warned_at >= QUIET:
            self._warned_at = now
            reason, count = reasons.most_common(1)[0]
            logger.warning("The broker did not take %d messages, they are tried again later: %s", count, reason)


def read(claim: Claim) -> Message:
    """The stored message.

    Raises:
        Undispatchable: the row holds none.
        ValueError: its JSON does not parse.
    """
    headers, properties = json.loads(claim.headers), json.loads(claim.properties)
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        raise Undispatchable("headers and properties must be JSON objects")
    return Message(
        body=claim.body, content_type=claim.content_type, content_encoding=claim.content_encoding, headers=headers,
        properties=properties, exchange=claim.exchange, routing_key=claim.routing_key, queue=claim.queue,
    )  # fmt: skip
