"""What every command works with, and how its end becomes an exit code."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import click
from celery import Celery
from celery.bin.base import CeleryOption
from celery.exceptions import ImproperlyConfigured
from sqlalchemy.exc import SQLAlchemyError

from celery_durable.cli.output import Output
from celery_durable.errors import DatabaseUnavailable, SchemaMismatch
from celery_durable.store import meta
from celery_durable.store.database import DATABASE_ERRORS, Database

P = ParamSpec("P")

DONE = 0
FAILED = 1
"""Not found, a check that failed, some of several, or an error of Postgres."""
USAGE = 2
UNAVAILABLE = 69
"""EX_UNAVAILABLE of sysexits.h, as Celery's own commands use it."""


class Session:
    """One command's app, database and output."""

    def __init__(self, app: Celery, out: Output) -> None:
        self.app = app
        self.out = out

    @property
    def unverified(self) -> Database:
        """The app's database, whatever is in it."""
        return Database.of(self.app)

    @property
    def database(self) -> Database:
        """The app's database, with a schema that this code knows and the app owns.

        Raises:
            SchemaMismatch: otherwise; says which command mends it.
            DatabaseUnavailable: Postgres cannot be reached.
        """
        database = self.unverified
        meta.verify(database, self.app.main)
        return database

    @property
    def operator(self) -> str:
        """Who acts, for the history."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user without a name
            user = "?"
        return f"{user}@{socket.gethostname()}"


def operates(body: Callable[Concatenate[Session, P], int | None]) -> Callable[P, None]:
    """Make a command's callback of a function that takes a session and returns an exit code (None is 0).

    Adds ``-j/--json`` and ``--traceback``.  No database is exit 69, a schema that does not fit or another error of
    Postgres 1, a wrong setting 2; each in one line.
    """

    @wraps(body)
    def callback(*args: P.args, **kwargs: P.kwargs) -> None:
        ctx = click.get_current_context()
        options: dict[str, Any] = dict(kwargs)
        out = Output(as_json=options.pop("as_json"), no_color=ctx.obj.no_color, quiet=ctx.obj.quiet)
        tracebacks = options.pop("tracebacks")
        try:
            code = body(Session(ctx.obj.app, out), *args, **options) or DONE
        except DatabaseUnavailable as exc:
            out.error(str(exc))
            code = UNAVAILABLE
        except SchemaMismatch as exc:
            out.error(str(exc))
            code = FAILED
        except ImproperlyConfigured as exc:
            out.error(str(exc))
            code = USAGE
        except (*DATABASE_ERRORS, SQLAlchemyError) as exc:
            if tracebacks:
                raise
            said = getattr(exc, "orig", None) or exc
            out.error(f"Postgres refuses: {' '.join(str(said).split())} (--traceback shows where)")
            code = FAILED
        ctx.exit(code)

    decorated: Callable[P, None] = callback
    for option in (_TRACEBACK, _JSON):
        decorated = option(decorated)
    return decorated


_JSON = click.option(
    "-j", "--json", "as_json", is_flag=True, cls=CeleryOption, help="One JSON document instead of tables."
)
_TRACEBACK = click.option(
    "--traceback", "tracebacks", is_flag=True, cls=CeleryOption, help="Show where an error of Postgres came up."
)
