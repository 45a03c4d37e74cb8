"""Chains, groups and chords at a later time: a small task of ours publishes the canvas when it is due.

A canvas cannot be one stored message: a group is many, and a chord counts its
members in the result backend from the moment it is applied, with keys that
expire.  So nothing of it is applied before it is due.  Its task ids are chosen
when it is stored, and are the same should the small task run twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature, _chain, chord, group
from kombu import uuid
from kombu.utils.json import dumps, loads

from celery_durable.errors import InvalidTimer

if TYPE_CHECKING:
    from celery import Celery

#: Name of the task that applies a stored canvas; every app with a DurableTask has it.
APPLY = "celery_durable.canvas"

#: What the timer itself takes of the options; the rest is for the canvas.
_OF_THE_TIMER = ("expires", "task_id")


def is_canvas(call: object) -> bool:
    """Whether it is more than one call."""
    return isinstance(call, (_chain, chord, group))


def frozen(
    canvas: Signature[Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Make a canvas into arguments of the task that applies it.

    Arguments:
        canvas: a chain, group or chord.
        args: arguments for it, as of its ``apply_async``.
        kwargs: keyword arguments for it.
        options: as of its ``apply_async``.

    Returns:
        The arguments, the options of the timer itself, and the result that the canvas will have.

    Raises:
        InvalidTimer: it cannot be written as JSON.
    """
    # Not freeze(), which may speak to the result backend.
    fixed = canvas.clone()
    result = with_ids(fixed)
    of_the_canvas = {name: value for name, value in options.items() if name not in _OF_THE_TIMER}
    try:
        # As text: what JSON has envelopes for must come back as it was, and Celery's messages may use any serializer.
        text = dumps([dict(fixed), list(args or ()), dict(kwargs or {}), of_the_canvas])
        json.loads(text)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidTimer(f"The {type(canvas).__name__.strip('_')} cannot be stored as JSON: {exc}") from exc
    return (text,), {name: value for name, value in options.items() if name in _OF_THE_TIMER}, result


def with_ids(signature: Any) -> Any:
    """Choose an id for each task in a canvas, where none is chosen; returns the result that it will have."""
    app = signature.app
    if isinstance(signature, _chain):
        return [with_ids(each) for each in signature.tasks][-1]
    if isinstance(signature, chord):
        for each in [signature.tasks] if isinstance(signature.tasks, group) else signature.tasks:
            with_ids(each)
        return with_ids(signature.body)
    chosen = signature.options.setdefault("task_id", uuid())
    if isinstance(signature, group):
        return app.GroupResult(chosen, [with_ids(each) for each in signature.tasks])
    return app.AsyncResult(chosen)


def apply(app: Celery, text: str) -> str:
    """Apply a stored canvas; returns the id of its result."""
    stored, args, kwargs, options = loads(text)
    signature: Any = Signature.from_dict(stored, app=app)
    result = signature.apply_async(args, kwargs, **options)
    if isinstance(signature, group) and not isinstance(signature, chord):
        result.save()
    return str(result.id)


def register(app: Celery, base: type[Any]) -> None:
    """Give an app the task that applies stored canvases; may be called again.

    Arguments:
        app: the app.
        base: DurableTask.
    """
    if getattr(app, "_durable_canvas", False):
        return
    vars(app)["_durable_canvas"] = True

    @app.task(  # type: ignore[untyped-decorator, unused-ignore]
        name=APPLY, base=base, bind=True, shared=False, max_retries=None, ignore_result=True, typing=False
    )
    def apply_canvas(self: Any, text: str) -> str:
        """Publish a canvas that is due."""
        return apply(self.app, text)
