"""What a task class of the user's puts in the place of ours: made safe when the task is bound, or refused."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from celery.exceptions import ImproperlyConfigured
from celery.utils.imports import symbol_by_name

#: Set by a function on itself: what ``functools.wraps`` copies of it to another is not that other.
_MARK = "_durable_leased_call"


def lease_around_call(task: Any, base: Any) -> None:
    """Have a ``__call__`` that is not ours run under the lease, whether it goes on to ours or runs the body itself.

    Of a class, a mixin or an annotation alike: Celery calls whatever the class has in the end.

    Arguments:
        task: the class of one task.
        base: DurableTask.
    """
    call = task.__call__
    if call is base.__call__ or getattr(call, _MARK, None) is call:
        return

    @wraps(call)
    def leased(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._leased(partial(call, self, *args, **kwargs))

    setattr(leased, _MARK, leased)
    task.__call__ = leased


def check_request(task: Any, ours: str) -> None:
    """Refuse a ``Request`` that does not settle the runs of processes that are gone.

    Arguments:
        task: the class of one task.
        ours: the name of our request class.

    Raises:
        celery.exceptions.ImproperlyConfigured: names the task, its request class and the fix.
    """
    if task.Request == ours:
        return
    chosen, needed = symbol_by_name(task.Request), symbol_by_name(ours)
    if not (isinstance(chosen, type) and issubclass(chosen, needed)):
        raise ImproperlyConfigured(
            f"Task {task.name}: Request={task.Request!r} must be a subclass of {ours}, "
            "which settles runs whose processes are gone."
        )
