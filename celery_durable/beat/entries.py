"""The recurring entries of the program: ``beat_schedule``, ``add_periodic_task``, Celery's own clean-up.

They are written into ``schedule`` at the start of a beat, marked as owned by
code.  What is the same as before keeps its cursor, so that a restart neither
loses nor repeats an occurrence; what changed begins anew, now; what has
vanished is disabled, not deleted.  Schedules made at run time are left alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import BaseSchedule, crontab, maybe_schedule
from celery.utils.log import get_logger

from celery_durable.core.catchup import Policy, first
from celery_durable.errors import DatabaseUnavailable, InvalidSchedule
from celery_durable.occurrence import check_overlap
from celery_durable.recurrence import Every, Recurrence, Spec, from_celery, from_spec, to_spec
from celery_durable.store import beats, meta, schedules
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import CODE_KIND, StoredSchedule

if TYPE_CHECKING:
    from celery import Celery

logger = get_logger(__name__)

OWNER = "code"

_POLICY_WORDS = tuple(each.name for each in fields(Policy))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of the program, understood."""

    name: str
    task: str
    recurrence: Recurrence
    spec: Spec | None
    """None: only this object can say when it is due."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]
    policy: Policy
    anchored: bool
    """Whether the program says from when an interval counts; from its creation otherwise."""
    storable: bool
    """Whether everything about it can stand in the database as it is."""

    @property
    def kind(self) -> str:
        """How the row says when it is due."""
        return self.spec.kind if self.spec is not None and self.storable else CODE_KIND

    @property
    def text(self) -> str:
        """The specification as text."""
        return self.spec.text if self.spec is not None else _ADDRESS.sub("", self.recurrence.describe())

    @property
    def timing(self) -> tuple[str, str, str | None]:
        """What a changed cursor depends on."""
        return self.kind, self.text, self.spec.tz if self.spec is not None else None

    @property
    def fingerprint(self) -> str:
        """A digest of everything that the program says about it."""
        anchor = self.spec.anchor.isoformat() if self.spec and self.spec.anchor and self.anchored else None
        said = [
            *self.timing,
            anchor,
            self.task,
            *map(_shown, (self.args, self.kwargs, self.options)),
            self.policy.written(),
        ]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def recurrence_from(self, anchor: datetime | None) -> Recurrence:
        """When it comes due, an interval counted from where its row says."""
        if self.spec is None or self.spec.kind != "interval" or self.anchored:
            return self.recurrence
        return from_spec(Spec(self.spec.kind, self.spec.text, self.spec.tz, anchor))

    def current_args(self) -> list[Any]:
        """The positional arguments, lazy ones evaluated now."""
        return [_evaluated(each) for each in self.args]

    def current_kwargs(self) -> dict[str, Any]:
        """The keyword arguments, lazy ones evaluated now."""
        return {name: _evaluated(each) for name, each in self.kwargs.items()}


def understood(app: Celery, entries: Mapping[str, Any]) -> tuple[dict[str, Entry], set[str]]:
    """Read entries in any form that ``beat_schedule`` takes.

    Arguments:
        app: whose zone counts.
        entries: dicts or Celery's ScheduleEntry objects by name.  A dict may also hold ``durable``, a dict
            of the words of :class:`~celery_durable.core.catchup.Policy` and ``tz``; so may its options.

    Returns:
        The entries, and the names of those that cannot be used: each has been logged, none stops the others.
    """
    good: dict[str, Entry] = {}
    bad: set[str] = set()
    for name, entry in entries.items():
        try:
            good[str(name)] = _understood(app, str(name), entry)
        except Exception as exc:  # the user's objects may raise anything; it stops this entry alone
            bad.add(str(name))
            logger.error("Schedule entry %r cannot be used: %s", name, exc)
    return good, bad


def _understood(app: Celery, name: str, entry: Any) -> Entry:
    schedules.check_name(name)
    if isinstance(entry, ScheduleEntry):
        names = ("task", "schedule", "args", "kwargs", "options")
        entry = {each: getattr(entry, each) for each in names}
    values = dict(entry)
    task, when = values.pop("task", None), values.pop("schedule", None)
    args, kwargs, options = (values.pop(each, None) for each in ("args", "kwargs", "options"))
    relative, durable = values.pop("relative", False), values.pop("durable", None)
    if options and "durable" in options:
        # add_periodic_task knows no further words: what it does not know becomes an option.
        options = dict(options)
        durable = options.pop("durable") if durable is None else durable
    if values:
        word = next(iter(values))
        hint = (
            f" Put it into the entry's durable: {{'durable': {{{word!r}: …}}}}"
            if word in (*_POLICY_WORDS, "tz")
            else ""
        )
        raise InvalidSchedule(f"{word!r} is no word of a schedule entry.{hint}")
    if not isinstance(durable or {}, Mapping):
        raise InvalidSchedule(f"durable = {durable!r} must be a dict of {', '.join((*_POLICY_WORDS, 'tz'))}.")
    said = dict(durable or {})
    tz = said.pop("tz", None)
    if not isinstance(task, str):
        raise InvalidSchedule(f"task = {task!r} must be the name of a task.")
    if isinstance(when, BaseSchedule) and tz is None:
        when.app = app  # as Celery does: its zone is the entry's
    elif relative and not isinstance(when, str):
        when = maybe_schedule(when, relative, app=app)
    zone = tz if tz is not None else None if isinstance(when, BaseSchedule) else app.timezone
    if said.get("deadline") is None and isinstance(when, (crontab, str)):
        said["deadline"] = app.conf.get("beat_cron_starting_deadline")
    spec = to_spec(when, zone, name=name)
    found = args or (), kwargs or {}, options or {}
    policy = Policy.of(said)
    check_overlap(app, task, policy)
    return Entry(
        name=name, task=task, recurrence=from_celery(when, zone, name=name), spec=spec, args=found[0], kwargs=found[1],
        options=found[2], policy=policy, anchored=isinstance(when, Every),
        storable=spec is not None and all(map(_same_in_json, found)),
    )  # fmt: skip


def digest(entries: Mapping[str, Entry], keep: set[str]) -> str:
    """What tells one version of a program's entries from another."""
    said = [*sorted((name, entry.fingerprint) for name, entry in entries.items()), *sorted(keep)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def sync(executor: Executor, entries: Mapping[str, Entry], keep: set[str]) -> bool:
    """Write the program's entries; call it within a transaction.

    While two versions of a program run at once, the entries are those of the one that came last: a beat of
    the earlier one that is started again leaves them alone until no beat of the later one is alive.

    Arguments:
        executor: in a transaction.
        entries: by name.
        keep: names that cannot be used now, but have not vanished.

    Returns:
        False when a later version's entries are in force; to be tried again.
    """
    now = schedules.begin_sync(executor)
    mine, known = digest(entries, keep), meta.code_versions(executor)
    if mine in known[:-1] and beats.alive_with(executor, known[-1]):
        return False
    if mine not in known[-1:]:
        meta.set_code_versions(executor, [*(each for each in known if each != mine), mine])
    for name in sorted(entries):
        entry = entries[name]
        try:
            with executor.atomic():
                _sync(executor, entry, now)
        except (DatabaseUnavailable, psycopg.OperationalError):
            raise
        except Exception as exc:  # as above: the user's schedule objects are asked when they come due
            logger.error("Schedule entry %r cannot be stored: %s", name, exc)
    for name in schedules.disable_vanished(executor, [*entries, *keep]):
        logger.warning("Schedule %r is no longer in the code: it is disabled.", name)
    return True


def _sync(executor: Executor, entry: Entry, now: datetime) -> None:
    before = schedules.lock(executor, entry.name)
    if before is not None and before.owner != OWNER:
        logger.error("Schedule entry %r is ignored: a schedule of that name was made at run time.", entry.name)
        return
    if before is not None and before.enabled and before.fingerprint == entry.fingerprint:
        return
    anchor, cursor, next_at = now, now, None
    if before is not None and not before.enabled:
        schedules.forget_waiting(executor, entry.name)
        before = replace(before, queued=0)
    ended = before is not None and before.next_at is None and before.pause is None
    if before is not None and before.enabled and not ended and (before.kind, before.text, before.tz) == entry.timing:
        anchor, cursor = before.anchor or now, before.cursor
    spec = entry.spec
    if spec is not None and spec.kind == "interval" and not entry.anchored:
        spec = Spec(spec.kind, spec.text, spec.tz, anchor)
    recurrence = entry.recurrence_from(anchor)
    entry.policy.check_jitter(recurrence, cursor)
    pause = None if before is None else before.pause
    nominal = first(recurrence, entry.policy, cursor, pause)
    if nominal is None and pause is None:
        logger.warning("Schedule entry %r never comes due.", entry.name)
    elif nominal is not None:
        next_at = nominal + entry.policy.delay(entry.name)
    if before is not None and before.queued and before.pause is None:
        next_at = now  # somebody waits for the run before to end
    stored = entry.kind != CODE_KIND
    schedules.put(
        executor,
        StoredSchedule(
            name=entry.name, task=entry.task, kind=entry.kind, text=entry.text, tz=spec.tz if spec else None,
            anchor=spec.anchor if spec else None, args=list(entry.args) if stored else [],
            kwargs=dict(entry.kwargs) if stored else {}, options=dict(entry.options) if stored else {},
            policy=entry.policy.written(), owner=OWNER, fingerprint=entry.fingerprint, cursor=cursor, next_at=next_at,
        ),
    )  # fmt: skip


def _evaluated(value: Any) -> Any:
    return value() if isinstance(value, BeatLazyFunc) else value


def _same_in_json(value: Any) -> bool:
    """Whether a value comes back from JSON as it went, but for tuples, which Celery's JSON turns into lists as well."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == _lists(value))
    except (TypeError, ValueError, RecursionError):
        return False


def _lists(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_lists(each) for each in value]
    if isinstance(value, dict):
        return {key: _lists(each) for key, each in value.items()}
    return value


def _shown(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        # Addresses would differ in every process, and each start would count as a change.
        return _ADDRESS.sub("", repr(value))
