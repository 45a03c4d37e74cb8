"""The ``durable_*`` settings of ``app.conf``, checked as one value.

Times are seconds (a number or a :class:`~datetime.timedelta`).  A wrong value
raises Celery's :exc:`~celery.exceptions.ImproperlyConfigured` naming the key,
the value and the fix.  Django projects spell them ``CELERY_DURABLE_*``.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields
from datetime import timedelta, tzinfo
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn
from zoneinfo import ZoneInfo

from celery.app import default_app
from celery.exceptions import ImproperlyConfigured
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

if TYPE_CHECKING:
    from celery import Celery

#: The database URL may come from the environment, so that no secret stands in code.
URL_VARIABLE = "CELERY_DURABLE_DATABASE_URL"

_PREFIX = "durable_"
_NAMESPACE = "CELERY_"
_DJANGO = f"{_NAMESPACE}DURABLE_"
_EMBEDDED = "embedded:"
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_MISSING = object()
_URL_FORM = "postgresql+psycopg://user:password@host:5432/dbname"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One app's settings, validated; build it with :meth:`from_app`."""

    database_url: str = field(repr=False)
    """SQLAlchemy URL ``postgresql+psycopg://…``, or ``embedded:<folder>``."""
    schema: str = "celery_durable"
    """Postgres schema that holds the tables of this app."""
    page: int = 500
    """Most rows that one claim or one sweep takes."""
    poll_interval: float = 5.0
    """Longest sleep of a beat between two looks, in seconds: the guarantee behind NOTIFY."""
    claim_timeout: float = 8.0
    """A claim not marked within this time is dispatched again by any beat."""
    publish_timeout: float = 3.0
    """Hard limit for publishing and confirming one page."""
    sweep_interval: float = 2.0
    """Time between two sweeps for expired claims, leases and timers."""
    lease: float = 30.0
    """How long a lease is valid without a heartbeat."""
    heartbeat: float = 10.0
    """Time between two heartbeats of a worker."""
    redispatch_after: float = 300.0
    """A dispatched timer that no worker has leased is published again after this, doubling."""
    redispatch_max: float = 3600.0
    """Where the doubling of ``redispatch_after`` ends."""
    undelivered_grace: float = 7 * 86400.0
    """A leased timer that no worker ever leased is dead after this."""
    unknown_task_grace: float = 86400.0
    """How long a timer whose task no worker knows is dispatched again, with growing pauses, before it is dead."""
    retention: float = 7 * 86400.0
    """How long history, and with it the uniqueness of finished keys, is kept."""
    max_payload: int = 1_000_000
    """Largest stored message, body and headers together, in bytes."""
    prepared_statements: bool = True
    """False behind a pooler in transaction mode (PgBouncer before 1.21)."""
    naive_datetimes: tzinfo | None = None
    """Zone in which naive datetimes are meant; None refuses them."""
    max_run: float = 86400.0
    """The longest that a run without a hard time limit is kept alive by heartbeats."""
    intercept_eta: float | None = None
    """Calls of plain tasks with a countdown or eta of at least this wait in Postgres; None: as Celery has it."""
    connect_timeout: float = 5.0
    """Longest wait for a database connection."""

    def __post_init__(self) -> None:
        for name in _DURATIONS:
            _positive(name, getattr(self, name))
        if self.intercept_eta is not None and not 0 <= self.intercept_eta < math.inf:
            _refuse("intercept_eta", self.intercept_eta, "None, or seconds of at least 0")
        for name in ("page", "max_payload"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                _refuse(name, value, "a whole number of at least 1")
        if not isinstance(self.prepared_statements, bool):
            _refuse("prepared_statements", self.prepared_statements, "True or False")
        _check_url(self.database_url)
        _check_schema(self.schema)
        self._ordered("heartbeat", self.heartbeat, "durable_lease / 3", self.lease / 3)
        self._ordered("publish_timeout", self.publish_timeout, "durable_claim_timeout / 2", self.claim_timeout / 2)
        self._ordered("redispatch_after", self.redispatch_after, "durable_redispatch_max", self.redispatch_max)

    @staticmethod
    def _ordered(name: str, value: float, limit_name: str, limit: float) -> None:
        if value > limit:
            raise ImproperlyConfigured(
                f"durable_{name} = {value:g} s is longer than {limit_name} = {limit:g} s. Lower the one or raise the other."
            )

    @classmethod
    def from_app(cls, app: Celery) -> Settings:
        """Read and check the settings of `app`.

        Raises:
            celery.exceptions.ImproperlyConfigured: naming the key, the value and the fix.
        """
        _check_keys(app)
        values: dict[str, Any] = {}
        for each in fields(cls):
            # app.add_defaults() would override the user's own configuration module.
            value = app.conf.get(f"durable_{each.name}", _MISSING)
            if value is not _MISSING:
                values[each.name] = value
        if not values.get("database_url"):
            values["database_url"] = os.environ.get(URL_VARIABLE) or _refuse_missing_url(app)
        for name in (*_DURATIONS, "intercept_eta"):
            if values.get(name) is not None:
                values[name] = _seconds(name, values[name])
        values["naive_datetimes"] = _zone(values.get("naive_datetimes"), app)
        return cls(**values)


_DURATIONS = (
    "poll_interval", "claim_timeout", "publish_timeout", "sweep_interval", "lease", "heartbeat",
    "redispatch_after", "redispatch_max", "undelivered_grace", "unknown_task_grace", "retention", "max_run", "connect_timeout",
)  # fmt: skip


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise ImproperlyConfigured(f"durable_{name} = {value!r} is not usable: it must be {wanted}.")


def _refuse_missing_url(app: Celery) -> NoReturn:
    text = (
        f"durable_database_url is not set in the app {app.main!r}. Set it to {_URL_FORM}, "
        f"or to embedded:./some-folder for development, in app.conf or as {URL_VARIABLE}."
    )
    if default_app == app:
        text += (
            " That is the app which Celery makes where there is none: import the module that makes yours first, "
            "or pass app=."
        )
    raise ImproperlyConfigured(text)


def _check_keys(app: Celery) -> None:
    """Refuse a ``durable_*`` key that nothing reads: it would be taken for one that is set.

    Keys only: reading a value can warn, as Django's settings do.
    """
    # First: an app reads its configuration, and learns the namespace, when it is asked for keys.
    keys = [str(key) for key in app.conf]
    space = getattr(app.conf, "prefix", None) or ""
    named = f"{space}{_PREFIX}"
    heads = {_PREFIX, named.upper() if space.isupper() else named.lower(), _DJANGO}
    names = [each.name for each in fields(Settings)]
    for key in keys:
        head = next((each for each in heads if key.startswith(each)), None)
        if head is None:
            continue
        if head == _DJANGO and space.upper() != _NAMESPACE:
            raise ImproperlyConfigured(
                f"{key} is not read: app.config_from_object() was told no namespace='CELERY'. "
                f"Tell it, or write {key.removeprefix(_NAMESPACE).lower()}."
            )
        known = {name: head + (name.upper() if head.isupper() else name) for name in names}
        if key not in known.values():
            close = get_close_matches(key.removeprefix(head).lower(), names, n=1)
            hint = f"Did you mean {known[close[0]]}? " if close else ""
            raise ImproperlyConfigured(
                f"{key} is no setting of celery-durable. {hint}There are: {', '.join(sorted(known.values()))}."
            )


def _check_url(url: object) -> None:
    """Refuse a URL that cannot be read; the message shows nothing of it that may be a password."""
    if not isinstance(url, str) or not url:
        raise ImproperlyConfigured(
            f"durable_database_url must be text such as {_URL_FORM}, not "
            f"{'empty' if url == '' else type(url).__name__}."
        )
    if url.startswith(_EMBEDDED):
        if not url.removeprefix(_EMBEDDED).strip():
            raise ImproperlyConfigured(
                f"durable_database_url = {url!r} names no folder. Say where the private PostgreSQL may keep its "
                "files: embedded:./some-folder."
            )
        return
    if not re.match(r"postgres(ql)?(\+psycopg)?://", url):
        scheme = url.split("://", 1)[0] if "://" in url else "something else"
        raise ImproperlyConfigured(
            f"durable_database_url must begin with postgresql+psycopg:// or embedded:, not {scheme}."
        )
    try:
        port = make_url(url).port
    except (ArgumentError, ValueError):
        port = 0
    if port is not None and not 0 < port < 65536:
        # Not the parts as they were read: after a wrong character in it they may be pieces of the password.
        raise ImproperlyConfigured(
            f"durable_database_url cannot be read: its port is no number from 1 to 65535, or it is not of the form "
            f"{_URL_FORM}. In user and password write / as %2F, : as %3A, @ as %40 and % as %25."
        )


def _check_schema(schema: object) -> None:
    if not isinstance(schema, str) or not _SCHEMA_NAME.fullmatch(schema):
        _refuse("schema", schema, "a lower-case identifier of at most 48 characters")
    if schema.startswith("pg_") or schema == "information_schema":
        _refuse("schema", schema, "a schema of its own: that name is Postgres' own")
    if schema == "public":
        _refuse("schema", schema, "a schema of its own: in public its tables would mix with those of others")


def _seconds(name: str, value: object) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(name, value, "seconds as a number, or a timedelta")
    return float(value)


def _positive(name: str, value: float) -> None:
    if not math.isfinite(value) or value <= 0:
        _refuse(name, value, "a positive, finite number of seconds")


def _zone(value: object, app: Celery) -> tzinfo | None:
    if value is None or value is False:
        return None
    if value is True:
        return app.timezone
    if isinstance(value, tzinfo):
        return value
    try:
        return ZoneInfo(str(value))
    except (KeyError, ValueError, OSError):
        _refuse("naive_datetimes", value, "None (refuse them), True (the app's zone) or an IANA zone name")
