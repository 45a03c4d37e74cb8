"""Celery calls as stored messages: rendered by the caller, published by a beat."""
