"""``durable migrate`` and ``durable check``: is the schema what this code needs?"""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import CeleryCommand, CeleryOption
from sqlalchemy.exc import DBAPIError

from celery_durable.cli.output import facts, plain
from celery_durable.cli.session import DONE, FAILED, Session, operates
from celery_durable.core import zone_data
from celery_durable.errors import SchemaMismatch
from celery_durable.store import meta, migrations, schedules
from celery_durable.store.database import MIGRATE, Database


@click.command(cls=CeleryCommand)
@click.option("--dry-run", is_flag=True, cls=CeleryOption, help="Only say from which revision to which it would go.")
@operates
def migrate(session: Session, *, dry_run: bool) -> int:
    """Create the schema, or bring it to the newest revision.

    Safe to repeat, and to run in several places at once: one does it, the others wait for it.
    """
    database = session.unverified
    before, after = migrations.current(database), migrations.head(database)
    if dry_run:
        migrations.refuse(database, before, app_name=session.app.main)
    else:
        try:
            after = migrations.upgrade(database, app_name=session.app.main)
        except DBAPIError as exc:
            session.out.error(f"Postgres refuses the migration of schema {database.schema!r}: {exc.orig}")
            return FAILED
    document = {"schema": database.schema, "from": before, "to": after, "changed": before != after, "dry_run": dry_run}
    session.out.show(
        document, lambda: facts([("schema", database.schema), ("from", before or "nothing"), ("to", after)])
    )
    if before == after:
        session.out.note("Nothing to do: the schema is at the newest revision.")
    elif dry_run:
        session.out.note("Nothing was changed: --dry-run.")
    return DONE


@click.command(cls=CeleryCommand)
@operates
def check(session: Session) -> int:
    """Check that the schema is what this code needs. Exit code 1 if not."""
    database = session.unverified
    found = _found(database, session.app.main)
    session.out.show(
        found,
        lambda: facts([
            ("schema", database.schema), ("status", found["status"]), ("revision", plain(found["revision"])),
            ("newest", found["head"]), ("time zones", found["zone_data"]),
        ]),
    )  # fmt: skip
    for zone in found["zones_differing"]:
        session.out.note(
            f"Time zone {zone} differs between the system's data, which is used, and the tzdata package: "
            "update the older of them, on every machine that runs a beat."
        )
    if found["ok"]:
        return DONE
    session.out.error(found["problem"])
    return FAILED


def _found(database: Database, app_name: str | None) -> dict[str, Any]:
    revision, head = migrations.current(database), migrations.head(database)
    found: dict[str, Any] = {
        "ok": False, "status": "ok", "schema": database.schema, "revision": revision, "head": head, "problem": None,
        "zone_data": zone_data.source(), "zones_differing": [],
    }  # fmt: skip
    if revision is None:
        return found | {"status": "missing", "problem": f"There is no schema {database.schema!r}. Run: {MIGRATE}"}
    if revision not in migrations.known(database):
        return found | {"status": "newer", "problem": _problem(migrations.refuse, database, revision)}
    problem = _problem(migrations.refuse, database, revision, app_name=app_name)
    if problem is not None:
        return found | {"status": "other_app", "problem": problem}
    if revision != head:
        problem = f"Schema {database.schema!r} is at revision {revision}, this code knows {head}. Run: {MIGRATE}"
        return found | {"status": "behind", "problem": problem}
    problem = _problem(meta.verify, database, app_name)
    if problem is not None:
        return found | {"status": "mismatch", "problem": problem}
    return found | {"ok": True, "zones_differing": zone_data.differing(database.run(schedules.zones))}


def _problem(judge: Any, *args: Any, **kwargs: Any) -> str | None:
    try:
        judge(*args, **kwargs)
    except SchemaMismatch as exc:
        return str(exc)
    return None
