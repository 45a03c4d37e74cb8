"""Decisions as pure functions over values, with the clock passed in: no Celery, no SQLAlchemy, no I/O."""
