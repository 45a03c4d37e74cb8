"""``meta``: the schema's version, the app that owns it, the number of shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def claim_for(executor: Executor, app_name: str | None) -> None:
    """Write down the owning app, if it has a name and none is written yet."""
    if app_name:
        executor.fetch(CLAIM_FOR, {"app": app_name})
