"""An exception as it is kept in the history: its type, its whole chain, its traceback."""

from __future__ import annotations

import traceback
from typing import Any

from celery_durable.store.runs import Failure


def describe(error: BaseException) -> Failure:
    """Describe an exception with everything that led to it.

    The error's text is its own message, followed by one line for each exception
    that caused it (``raise … from``) or during whose handling it was raised.
    """
    lines = [_message(error)]
    seen = {id(error)}
    each: BaseException | None = error
    while each is not None:
        how, each = _before(each)
        if each is None or id(each) in seen:
            break
        seen.add(id(each))
        lines.append(f"{how} {type_name(each)}: {_message(each)}")
    # format_exception prints the same chain, with the frames.
    return Failure(error_type=type_name(error), error="\n".join(lines), traceback=_traceback(error))


def type_name(error: BaseException) -> str:
    """The qualified name of the exception's class, without ``builtins.``."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def carried(error: BaseException, einfo: Any) -> Failure:
    """Describe an exception that came from another process, with its traceback as text."""
    kept = describe(error)
    text = str(getattr(einfo, "traceback", "") or "")
    return Failure(error_type=kept.error_type, error=kept.error, traceback=text or kept.traceback)


def _before(error: BaseException) -> tuple[str, BaseException | None]:
    if error.__cause__ is not None:
        return "caused by", error.__cause__
    return "while handling", None if error.__suppress_context__ else error.__context__


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as exc:  # the user's own __str__ may do anything
        return f"<its text cannot be shown: {type(exc).__name__}>"


def _traceback(error: BaseException) -> str | None:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # as above: without a traceback the failure is still kept
        return None
