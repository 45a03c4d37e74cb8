"""The last word of a beat that ends as it should, so that nobody looks for it."""

from __future__ import annotations

from contextlib import closing
from threading import Thread
from uuid import UUID

from celery.utils.log import get_logger

from celery_durable.store import beats
from celery_durable.store.database import DATABASE_ERRORS, Database, translated
from celery_durable.store.executor import PsycopgExecutor

logger = get_logger(__name__)

#: Longest wait for it, in seconds: whoever has sent SIGTERM waits, too.
PATIENCE = 0.5


def say_goodbye(database: Database, beat_id: UUID) -> None:
    """Delete the beat's row, on a connection of its own: those that it had may have been cut in mid-statement.

    In a thread that nobody waits for longer than :data:`PATIENCE`: without an answer the
    beat is shown as silent, as one that was killed.
    """

    def speak() -> None:
        try:
            with translated(), closing(database.connect("celery-durable beat")) as connection:
                beats.gone(PsycopgExecutor(connection, database.schema), beat_id)
        except DATABASE_ERRORS as exc:
            logger.debug("Nobody heard this beat end: %s", exc)

    thread = Thread(target=speak, name="durable-goodbye", daemon=True)
    thread.start()
    thread.join(PATIENCE)
