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
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from celery.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from celery import Celery

#: The database URL may come from the environment, so that no secret stands in code.
URL_VARIABLE = "CELERY_DURABLE_DATABASE_URL"

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_MISSING = object()


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
    retention: float = 7 * 86400.0
    """How long history, and with it the uniqueness of finished keys, is kept."""
    unknown_task_grace: float = 86400.0
    """How long a task name that workers do not know is tried before it is dead."""
    max_payload: int = 1_000_000
    """Largest stored message, body and headers together, in bytes."""
    prepared_statements: bool = True
    """False behind a pooler in transaction mode (PgBouncer before 1.21)."""
    naive_datetimes: tzinfo | None = None
    """Zone in which naive datetimes are meant; None refuses them."""
    connect_timeout: float = 5.0
    """Longest wait for a database connection."""

    def __post_init__(self) -> None:
        for name in _DURATIONS:
            _positive(name, getattr(self, name))
        for name in ("page", "max_payload"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                _refuse(name, value, "a whole number of at least 1")
        if not self.database_url or not isinstance(self.database_url, str):
            raise ImproperlyConfigured(
                "durable_database_url is not set. Set it to postgresql+psycopg://user:password@host/dbname, "
                f"or to embedded:./some-folder for development, in app.conf or as {URL_VARIABLE}."
            )
        if not re.match(r"(postgres(ql)?(\+psycopg)?://|embedded:.)", self.database_url):
            raise ImproperlyConfigured(
                "durable_database_url must begin with postgresql+psycopg:// or embedded:, "
                f"not {self.database_url.split(':', 1)[0]!r}."
            )
        if not isinstance(self.schema, str) or not _SCHEMA_NAME.fullmatch(self.schema):
            _refuse("schema", self.schema, "a lower-case identifier of at most 48 characters")
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
        values: dict[str, Any] = {}
        for each in fields(cls):
            # app.add_defaults() would override the user's own configuration module.
            value = app.conf.get(f"durable_{each.name}", _MISSING)
            if value is not _MISSING:
                values[each.name] = value
        if not values.get("database_url"):
            values["database_url"] = os.environ.get(URL_VARIABLE, "")
        for name in _DURATIONS:
            if name in values:
                values[name] = _seconds(name, values[name])
        values["naive_datetimes"] = _zone(values.get("naive_datetimes"), app)
        return cls(**values)


_DURATIONS = (
    "poll_interval", "claim_timeout", "publish_timeout", "sweep_interval", "lease", "heartbeat",
    "redispatch_after", "redispatch_max", "undelivered_grace", "retention", "unknown_task_grace",
    "connect_timeout",
)  # fmt: skip


def _refuse(name: str, value: object, wanted: str) -> None:
    raise ImproperlyConfigured(f"durable_{name} = {value!r} is not usable: it must be {wanted}.")


def _seconds(name: str, value: object) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(name, value, "seconds as a number, or a timedelta")
    return float(value)  # type: ignore[arg-type]  # _refuse has raised for anything else


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
        raise AssertionError from None
