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
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from uuid import UUID

from celery.utils.log import get_logger

from celery_durable.beat.link import Link
from celery_durable.core.pacing import Clock, Outage, Watermark, pause_of_returned
from celery_durable.errors import DurableError
from celery_durable.messages.delivery import BrokerUnavailable, Outcome, Outgoing, Publisher
from celery_durable.messages.message import Message
from celery_durable.settings import Settings
from celery_durable.store import claims
from celery_durable.store.claims import Claim
from celery_durable.store.executor import Executor

logger = get_logger(__name__)

#: Longest stretch of dispatching before sweeps and occurrences get their turn, in seconds.
STRETCH = 1.0
#: Least seconds between two warnings about messages that the broker gives back.
QUIET = 60.0
#: Seconds after which a message that fails in a way nobody knows, and never did otherwise, is a dead letter.
LONG_FAILING = 86_400.0


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
    returned: list[Claim] = field(default_factory=list)
    bad: list[tuple[Claim, Exception]] = field(default_factory=list)


class Dispatcher:
    """Takes due timers to the broker.

    A page that could not be published at all is let go of for a short time.
    After that, until the broker is back, one timer at a time serves as probe.

    Arguments:
        link: the beat's connection.
        publisher: to the broker.
        settings: page size and time limits.
        outage: the broker's.
        clock: the database's clock.
    """

    def __init__(self, link: Link, publisher: Publisher, settings: Settings, outage: Outage, clock: Clock) -> None:
        self._link = link
        self._publisher = publisher
        self._settings = settings
        self._outage = outage
        self._clock = clock
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
        found = self._link.run(
            lambda executor: claims.reclaim(executor, ids[: self.page], timeout=self._settings.claim_timeout)
        )
        self._serve(Page(claims=found, held=len(found), claimed_at=started))
        return len(found)

    def _claim(self, executor: Executor, shard: int, watermark: Watermark, size: int) -> Page:
        started = time.monotonic()
        bound = watermark.begin(started)
        found, held = claims.claim(
            executor, shard=shard, watermark=claims.UNBOUNDED if bound is None else bound, page=size,
            timeout=self._settings.claim_timeout,
        )  # fmt: skip
        if held < size:
            watermark.emptied(self._clock.at(started))
        elif found and isfinite(found[-1].wake_at):
            watermark.filled(found[-1].wake_at)
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
        if not outgoing:
            return
        deliveries = self._publisher.publish(outgoing)
        uncertain = ""
        reasons: Counter[str] = Counter()
        for delivery in deliveries:
            claim = by_id[delivery.timer_id]
            if delivery.outcome is Outcome.CONFIRMED:
                page.confirmed.append(claim)
            elif delivery.outcome is Outcome.REFUSED or (
                delivery.outcome is Outcome.FAILED and self._late(claim) > LONG_FAILING
            ):
                page.bad.append((claim, Undispatchable(delivery.reason)))
            elif delivery.outcome in (Outcome.RETURNED, Outcome.FAILED):
                page.returned.append(claim)
                reasons[delivery.reason] += 1
            else:
                # The broker may have it: it is published again when its claim expires.
                uncertain = delivery.reason or "no word from the broker"
        if reasons:
            self._warn(reasons)
        if uncertain and not page.confirmed:
            self._failed(uncertain)
        else:
            self._worked()

    def _settle(self, executor: Executor, page: Page) -> None:
        if page.confirmed:
            lateness = claims.mark(
                executor, page.confirmed, redispatch_after=self._settings.redispatch_after,
                redispatch_max=self._settings.redispatch_max,
            )  # fmt: skip
            self.dispatched += len(lateness)
            if logger.isEnabledFor(logging.DEBUG):
                for claim in page.confirmed:
                    logger.debug("%s sent. id->%s", claim.task, claim.id)
        for claim in page.returned:
            pause = pause_of_returned(self._late(claim), most=self._settings.redispatch_after)
            claims.release(executor, [claim], pause=pause)
        for claim, error in page.bad:
            if claims.quarantine(executor, claim, error):
                logger.error("Timer %s (%s) can never be published, it is dead now: %s", claim.id, claim.task, error)

    def _late(self, claim: Claim) -> float:
        """Seconds since it was due."""
        return self._clock.at(time.monotonic()) - (claim.due_at if isfinite(claim.due_at) else 0.0)

    def _let_go(self, page: Page) -> None:
        pause = max(self._outage.remaining(time.monotonic()), 0.1)
        self._link.run(lambda executor: claims.release(executor, page.claims, pause=pause))

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
            logger.warning("The broker gave back %d messages, they are tried again later: %s", count, reason)


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
