"""Signals about timers, as Celery's own: ``timer_dead.connect(tell_somebody)``.

The sender is the app.  Each is sent in the process that learns of it: a beat or
a worker, there the pool's process or its parent.  A receiver's exception is
logged and changes nothing; a receiver that takes long holds that process up.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

#: The broker has a timer's message.  ``timer_id``, ``task``, ``lateness`` (seconds), ``leased``.
timer_dispatched = Signal(name="timer_dispatched", providing_args=["timer_id", "task", "lateness", "leased"])

#: A worker has taken the lease; the body is about to run.  ``timer_id``, ``task``, ``attempt``, ``fence``.
timer_started = Signal(name="timer_started", providing_args=["timer_id", "task", "attempt", "fence"])

#: An attempt has ended and another follows.  ``timer_id``, ``task``, ``attempt``, ``error``.
timer_retried = Signal(name="timer_retried", providing_args=["timer_id", "task", "attempt", "error"])

#: A timer is a dead letter now.  ``timer_id``, ``task``, ``reason``, ``error``.
timer_dead = Signal(name="timer_dead", providing_args=["timer_id", "task", "reason", "error"])

#: A run has found its lease replaced: nothing of it was stored or sent.  ``timer_id``, ``task``, ``attempt``, ``fence``.
lease_lost = Signal(name="lease_lost", providing_args=["timer_id", "task", "attempt", "fence"])
