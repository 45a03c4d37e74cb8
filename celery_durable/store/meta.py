"""``meta``: the schema's version, the app that owns it, the number of shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from celery_durable.errors import SchemaMismatch
from celery_durable.store.database import MIGRATE, Database
from celery_durable.store.executor import Executor

#: Raised only by a migration that old code cannot live with.
SCHEMA_MAJOR = 1
#: The newest migration, which this code needs; a newer one of the same major version adds only.
REVISION = "0001"

# Purpose: what a process checks before its first statement.  Index: none: a handful of rows.  Locks: none.
READ = """
select name, value::text as value from {schema}.meta
union all select 'revision', to_json(version_num)::text from {schema}.alembic_version
"""

# Purpose: the first app to migrate owns the schema.  Index: primary key.  Locks: the row.
CLAIM_FOR = """
insert into {schema}.meta (name, value) values ('app', to_json(%(app)s::text))
on conflict (name) do nothing
"""


def verify(database: Database, app_name: str | None) -> None:
    """Check that this process may work on the schema.

    Raises:
        SchemaMismatch: no schema, another major version, or another app's; says which command mends it.
        DatabaseUnavailable: when Postgres cannot be reached.
    """
    found = values(database)
    major = found.get("schema_major")
    if major != SCHEMA_MAJOR:
        mend = (
            f"Run: {MIGRATE}" if not isinstance(major, int) or major < SCHEMA_MAJOR else "Upgrade celery-durable here."
        )
        raise SchemaMismatch(
            f"Schema {database.schema!r} is of major version {major}, this code needs {SCHEMA_MAJOR}. {mend}"
        )
    revision = found.get("revision")
    if revision is None or revision < REVISION:
        raise SchemaMismatch(
            f"Schema {database.schema!r} is at revision {revision}, this code needs {REVISION}. Run: {MIGRATE}"
        )
    refuse_foreign(database, found, app_name)


def values(database: Database) -> dict[str, Any]:
    """Everything that stands in ``meta``, and the schema's ``revision``."""
    return {row.name: json.loads(row.value) for row in database.run(lambda executor: executor.fetch(READ))}


def refuse_foreign(database: Database, found: Mapping[str, Any], app_name: str | None) -> None:
    """Refuse a schema whose ``meta``, as `found`, names another app.

    Raises:
        SchemaMismatch: says which setting gives this app a schema of its own.
    """
    owner = found.get("app")
    if owner and app_name and owner != app_name:
        raise SchemaMismatch(
            f"Schema {database.schema!r} belongs to the app {owner!r}, this is {app_name!r}. "
            f"Give this app a schema of its own: durable_schema = 'celery_durable_{app_name}', then run: {MIGRATE}"
        )


# Purpose: one value by its name.  Index: primary key.  Locks: the row when it is written.
GET = "select value::text as value from {schema}.meta where name = %(name)s"
SET = """
insert into {schema}.meta (name, value) values (%(name)s, %(value)s::json)
on conflict (name) do update set value = excluded.value
"""

#: Versions of a program's entries that are remembered.
VERSIONS = 20


def code_versions(executor: Executor) -> list[str]:
    """The versions of recurring entries that were in force, the present one last."""
    return list(_get(executor, "code") or [])


def set_code_versions(executor: Executor, versions: Sequence[str]) -> None:
    """Remember the versions of recurring entries, the present one last."""
    _set(executor, "code", versions[-VERSIONS:])


def zone_data(executor: Executor) -> dict[str, str]:
    """The fingerprint of each time zone's data that next times were computed with."""
    return dict(_get(executor, "zones") or {})


def set_zone_data(executor: Executor, fingerprints: Mapping[str, str]) -> None:
    """Remember what next times were computed with."""
    _set(executor, "zones", fingerprints)


def _get(executor: Executor, name: str) -> Any:
    rows = executor.fetch(GET, {"name": name})
    return json.loads(rows[0].value) if rows else None


def _set(executor: Executor, name: str, value: object) -> None:
    executor.fetch(SET, {"name": name, "value": json.dumps(value)})


def claim_for(executor: Executor, app_name: str | None) -> None:
    """Write down the owning app, if it has a name and none is written yet."""
    if app_name:
        executor.fetch(CLAIM_FOR, {"app": app_name})
