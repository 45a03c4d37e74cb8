"""What one beat does, turn by turn: connect, settle occurrences, dispatch, sweep, sleep.

Nothing that goes wrong with Postgres or the broker ends a beat.  It says once
that one of them is away, tries again with growing pauses of at most five
seconds, and says when it is back.  Only a schema that this code cannot work
on ends it, because waiting would not mend that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from random import random
from typing import TYPE_CHECKING, Any

import psycopg
from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_logger

from celery_durable.beat import entries
from celery_durable.beat.dispatch import Dispatcher
from celery_durable.beat.ending import end_held_back
from celery_durable.beat.goodbye import say_goodbye
from celery_durable.beat.link import Link
from celery_durable.beat.occurrences import Occurrences
from celery_durable.beat.sweeps import Sweeper
from celery_durable.beat.wakeup import Wakeup
from celery_durable.beat.zone_watch import ZoneWatch
from celery_durable.core.pacing import Clock, HeldUp, Outage, Watermark, jittered
from celery_durable.errors import DatabaseUnavailable, SchemaMismatch
from celery_durable.messages.delivery import BrokerUnavailable, Publisher
from celery_durable.store import claims, meta
from celery_durable.store.claims import UNBOUNDED
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor

if TYPE_CHECKING:
    from celery import Celery

logger = get_logger(__name__)

#: Seconds between two looks at the number of shards.
SHARDS_EVERY = 10.0
#: Seconds between two tries to write entries while a beat with later ones is alive.
SYNC_AGAIN = 10.0


class Loop:
    """One beat at work in one process.  Makes no connection before its first turn.

    Arguments:
        app: the app.
        publisher: to its broker.
        code: gives the program's recurring entries by name, when they are wanted.
    """

    def __init__(self, app: Celery, publisher: Publisher, code: Callable[[], Mapping[str, Any]]) -> None:
        self.pid = os.getpid()
        self._app = app
        self._code = code
        self._database = Database.of(app)
        self._settings = self._database.settings
        self._publisher = publisher
        self._link = Link(self._database, "celery-durable beat")
        self._wakeup = Wakeup(self._database)
        self._clock = Clock()
        self._postgres = Outage(random=random)
        self._broker = Outage(random=random)
        self._dispatcher = Dispatcher(app, self._link, publisher, self._settings, self._broker, self._clock)
        self._sweeper = Sweeper(app, self._link, self._dispatcher, self._broker, self._settings)
        self._occurrences: Occurrences | None = None
        self._zones = ZoneWatch(self._link, lambda: None)
        self._entries: tuple[dict[str, entries.Entry], set[str]] = {}, set()
        self._sync_at = inf
        self._watermarks: dict[int, Watermark] = {}
        self._shards_at = float("-inf")
        self._held_up = HeldUp()

    def turn(self, longest: float) -> None:
        """Do what is due, then sleep until there is more to do.

        Arguments:
            longest: most seconds to sleep.

        Raises:
            SchemaMismatch: the schema is missing or of another version; only when (re)connecting.
            celery.exceptions.ImproperlyConfigured: the private server of an ``embedded:`` URL cannot be had.
        """
        try:
            if self._occurrences is None or not self._link.connected:
                self._connect()
            wait = self._guarded_work(longest)
        except (SchemaMismatch, ImproperlyConfigured):
            raise
        except DatabaseUnavailable as exc:
            wait = self._failed("Postgres does not answer, trying again until it does: %s", exc)
        except psycopg.Error as exc:
            # A deadlock, a cancelled statement, a full disk: that statement changed nothing.
            wait = self._failed("Postgres refuses a statement, trying again: %s", exc)
        except Exception as exc:  # a bug, here or in a client library, is no reason to leave all timers alone
            logger.debug("Unexpected error", exc_info=True)
            wait = self._failed("Unexpected error, trying again: %r", exc)
        if wait <= 0:
            return
        until = time.monotonic() + min(wait, longest)
        if self._postgres.active:
            time.sleep(max(until - time.monotonic(), 0))
        else:
            self._wakeup.sleep(until, self._heard)

    def _failed(self, text: str, exc: Exception) -> float:
        """Say what has failed if it is news; returns the pause before the next try."""
        if self._postgres.failed(time.monotonic()):
            logger.error(text, exc)
        return self._postgres.remaining(time.monotonic())

    def look_again(self) -> None:
        """Look at everything at the next turn, as after an outage or a change of the database's clock."""
        for watermark in self._watermarks.values():
            watermark.forget()
        self._shards_at = float("-inf")
        self._sweeper.soon()
        self._wakeup.again()
        if self._occurrences is not None:
            self._occurrences.soon()

    def cut(self) -> None:
        """Shut all sockets down: for signal handlers.  May be called again."""
        self._publisher.abandon()
        self._link.cut()
        self._wakeup.cut()

    def close(self) -> None:
        """Close all connections and say that this beat has ended; nothing waits long for an answer."""
        self._publisher.close()
        self._link.close()
        self._wakeup.close()
        if self._occurrences is not None and not self._postgres.active:
            self._occurrences = None
            say_goodbye(self._database, self._sweeper.beat_id)

    def _connect(self) -> None:
        first = self._occurrences is None
        self._link.run(lambda executor: None)
        probe = Database(self._settings)
        try:
            meta.verify(probe, self._app.main)
        finally:
            probe.close()  # the app's own pool may be in use by other threads
        if self._occurrences is None:
            self._entries = entries.understood(self._app, self._code())
            self._sweeper.code = entries.digest(*self._entries)
            self._sync_entries()
        else:
            self._sync_at = time.monotonic()  # another version may have taken over meanwhile
        self.look_again()
        if first:
            logger.info("Dispatching timers from schema %r.", self._settings.schema)

    def _sync_entries(self) -> None:
        good, bad = self._entries

        def sync(executor: Executor) -> bool:
            # Together: an earlier version that starts meanwhile must see that somebody has these entries.
            try:
                with executor.atomic():
                    self._sweeper.say_alive(executor)
            except (DatabaseUnavailable, psycopg.OperationalError):
                raise
            except psycopg.Error as exc:
                logger.debug("Nobody sees that this beat is alive: %s", exc)  # the sweep says so
            return entries.sync(executor, good, bad)

        synced = self._link.transact(sync)
        again, self._sync_at = self._sync_at < inf, inf if synced else time.monotonic() + SYNC_AGAIN
        if again and not synced:
            return
        self._occurrences = Occurrences(self._app, self._link, self._settings, good)
        self._zones = ZoneWatch(self._link, self._occurrences.forget)
        if not synced:
            logger.warning("A beat with later recurring entries runs: those of this program wait until it has ended.")

    def _guarded_work(self, longest: float) -> float:
        try:
            return self._work(longest)
        except SchemaMismatch as exc:
            # Somebody has dropped or changed the tables under us: connecting again tells what there is now.
            self._link.drop()
            return self._failed("The tables have changed, looking again: %s", exc)

    def _work(self, longest: float) -> float:
        """One round.

        Returns:
            Seconds until the next one; 0 when there is more to do at once.
        """
        assert self._occurrences is not None
        self._look_at_shards()
        if time.monotonic() >= self._sync_at:
            self._sync_entries()
        self._zones.turn()
        self._occurrences.turn()
        until = jittered(self._settings.poll_interval, random)
        try:
            with end_held_back() as ending:
                self._sweeper.turn(ending)
            if self._broker.remaining(time.monotonic()):
                until = min(until, self._broker.remaining(time.monotonic()))
            else:
                until = min(until, self._dispatch())
        except BrokerUnavailable as exc:
            self._dispatcher.broker_failed(exc)
            until = min(until, self._broker.remaining(time.monotonic()))
        away = self._postgres.worked(time.monotonic())
        if away is not None:
            logger.warning("Postgres answers again after %.1f s.", away)
        now = time.monotonic()
        return min(
            until,
            longest,
            self._occurrences.remaining(now),
            self._sweeper.remaining(now),
            max(self._sync_at - now, 0.0),
        )

    def _dispatch(self) -> float:
        """Dispatch what is due in every shard; returns seconds until more is, 0 when there may be more now."""
        until = inf
        for shard, watermark in self._watermarks.items():
            with end_held_back() as ending:
                more = self._dispatcher.drain(shard, watermark, ending)
            if more:
                until = 0.0
                continue
            bound = UNBOUNDED if watermark.bound is None else watermark.bound
            outlook = self._link.run(partial(claims.next_due, shard=shard, watermark=bound))
            now = time.monotonic()
            self._clock.read(outlook.now, now)
            pause = self._held_up.pause(None if outlook.wake_at is None else outlook.wake_at - outlook.now)
            until = min(until, inf if pause is None else pause)
        if self._broker.active:
            until = min(until, self._broker.remaining(time.monotonic()))
        return until

    def _look_at_shards(self) -> None:
        now = time.monotonic()
        if now < self._shards_at:
            return
        self._shards_at = now + SHARDS_EVERY
        number, database = self._link.run(claims.shards)
        self._clock.read(database, time.monotonic())
        self._watermarks = {shard: self._watermarks.get(shard) or Watermark() for shard in range(number)}

    def _heard(self, payload: str) -> float:
        """Take an announcement; returns until when, on the monotonic clock, to sleep because of it."""
        now = time.monotonic()
        try:
            wake_at = float(payload)
        except ValueError:
            assert self._occurrences is not None
            self._occurrences.soon()
            return now
        for watermark in self._watermarks.values():
            watermark.lower(wake_at)
        return now + self._clock.until(wake_at, now)
