"""Alembic's entry: runs the revisions on the connection that :func:`upgrade` gives it."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text
from sqlalchemy.schema import CreateSchema

schema = context.config.attributes["schema"]
connection = context.config.attributes["connection"]

connection.execute(CreateSchema(schema, if_not_exists=True))
# Lets a revision write plain names: they are created in our schema and nowhere else.
connection.execute(text(f'set local search_path to "{schema}"'))
context.configure(connection=connection, version_table_schema=schema, transaction_per_migration=False)
with context.begin_transaction():
    context.run_migrations()
