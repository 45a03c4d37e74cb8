"""Alembic migrations of our own schema: expand first, contract a release later.

The version table stands in the schema itself, every name is qualified, and the
major version stands in ``meta``: code meets only a schema of its own major.
"""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from celery_durable.errors import SchemaMismatch
from celery_durable.store import meta
from celery_durable.store.database import Database, translated


def config_for(database: Database) -> Config:
    """Alembic's configuration for one schema of one database."""
    config = Config()
    config.set_main_option("script_location", "celery_durable.store:migrations")
    config.attributes["schema"] = database.schema
    return config


def head(database: Database) -> str:
    """The newest revision that this code knows."""
    found = ScriptDirectory.from_config(config_for(database)).get_current_head()
    assert found is not None
    return found


def current(database: Database) -> str | None:
    """The revision that the database is at; None when there is no schema.

    Raises:
        DatabaseUnavailable: when Postgres cannot be reached.
    """
    with translated(), create_engine(database.url, poolclass=NullPool).connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table_schema": database.schema})
        return context.get_current_revision()


def upgrade(database: Database, *, app_name: str | None = None) -> str:
    """Bring the schema to the newest revision, and name the app that owns it.

    One process migrates at a time; others wait for its lock and find nothing to do.

    Returns:
        The revision reached.

    Raises:
        DatabaseUnavailable: when Postgres cannot be reached.
        SchemaMismatch: when the schema belongs to another app or is newer than this code.
    """
    config = config_for(database)
    with translated(), create_engine(database.url, poolclass=NullPool).connect() as connection:
        # Of the transaction, not the session: a pooler may give each transaction another session.
        connection.exec_driver_sql(
            "select pg_advisory_xact_lock(hashtext(%(name)s))", {"name": f"migrate {database.schema}"}
        )
        refuse(database, current(database), app_name=app_name)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()
    database.run(lambda executor: meta.claim_for(executor, app_name))
    return head(database)


def known(database: Database) -> frozenset[str]:
    """The revisions that this code knows."""
    scripts = ScriptDirectory.from_config(config_for(database)).walk_revisions()
    return frozenset(script.revision for script in scripts)


def refuse(database: Database, found: str | None, *, app_name: str | None = None) -> None:
    """Refuse a schema that is not this app's to migrate.

    Arguments:
        database: where the schema is.
        found: the revision it is at; None where there is none yet.
        app_name: this app's; None is no app in particular.

    Raises:
        SchemaMismatch: it is newer than this code, or belongs to another app.
        DatabaseUnavailable: when Postgres cannot be reached.
    """
    if found is None:
        return
    if found not in known(database):
        raise SchemaMismatch(
            f"Schema {database.schema!r} is at revision {found}, newer than this code knows ({head(database)}). "
            f"Upgrade celery-durable here before migrating."
        )
    meta.refuse_foreign(database, meta.values(database), app_name)
