"""Postgres: one module of SQL per subject, reached through :class:`~celery_durable.store.database.Database`."""
