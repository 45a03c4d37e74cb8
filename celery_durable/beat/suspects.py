"""Messages after which the broker's connection broke: one of them may be why, and must not stop the others.

Nobody says which one it was, so they are sent again in ever smaller groups, at
last each alone.  What is known is kept in memory only: another beat, or the
same one started anew, finds out for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from celery_durable.messages.delivery import Outgoing

#: A group that broke the connection is sent again in so many parts.
PARTS = 8
#: Most messages to remember; those suspected longest ago are forgotten.
MOST = 10_000


@dataclass
class _Record:
    group: int
    """Most messages to send it with; 0: any number."""
    failures: int = 0
    heard: int = -1
    """How many messages the broker had confirmed when a failure was last counted."""


class Suspects:
    """What this beat suspects of breaking the connection, by timer."""

    def __init__(self) -> None:
        self._records: dict[object, _Record] = {}
        self._heard = 0

    def batches(self, outgoing: Sequence[Outgoing], *, alone: bool) -> list[list[Outgoing]]:
        """Part a page into what may be sent together: first all that is above suspicion.

        Arguments:
            outgoing: the page.
            alone: send each by itself, whatever is known of it.
        """
        if not alone and not self._records:
            return [list(outgoing)]
        # The larger its group and the rarer its failures, the less it is suspected; time may be up before the last.
        ordered = sorted(outgoing, key=lambda each: self._suspicion(each.timer_id))
        batches: list[list[Outgoing]] = []
        for group, members in groupby(ordered, key=lambda each: self._group(each.timer_id)):
            together = list(members)
            step = 1 if alone else group or len(together)
            batches += [together[start : start + step] for start in range(0, len(together), step)]
        return batches

    def known(self, timer_id: object) -> bool:
        """Whether it is suspected."""
        return self._group(timer_id) > 0

    def came_through(self, timer_ids: Collection[object]) -> None:
        """The broker has confirmed these."""
        self._heard += len(timer_ids)
        if self._records:
            for each in timer_ids:
                self._records.pop(each, None)

    def broke(self, timer_ids: Sequence[object]) -> None:
        """The connection broke, or the time was up, over these."""
        for each in timer_ids:
            record = self._record(each)
            record.group = max(len(timer_ids) // PARTS, 1)
            if len(timer_ids) == 1:
                self._count(record)

    def failed(self, timer_id: object) -> None:
        """It failed by itself, and broke nothing."""
        self._count(self._record(timer_id))

    def failures(self, timer_id: object) -> int:
        """How often it has failed by itself; without a message that came through in between, several count as one."""
        record = self._records.get(timer_id)
        return 0 if record is None else record.failures

    def _group(self, timer_id: object) -> int:
        record = self._records.get(timer_id)
        return 0 if record is None else record.group

    def _suspicion(self, timer_id: object) -> tuple[bool, int, int]:
        known = self.known(timer_id)
        return known, -self._group(timer_id), self.failures(timer_id) if known else 0

    def _record(self, timer_id: object) -> _Record:
        record = self._records.pop(timer_id, None) or _Record(group=0)
        self._records[timer_id] = record
        if len(self._records) > MOST:
            del self._records[next(iter(self._records))]
        return record

    def _count(self, record: _Record) -> None:
        if record.heard != self._heard:
            record.failures += 1
            record.heard = self._heard
