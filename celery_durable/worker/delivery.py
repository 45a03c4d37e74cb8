"""One delivery of a leased timer's message, and the deliveries that this worker has in hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4
from weakref import WeakValueDictionary

#: Where the parent process leaves the token for the process that runs the body.
TOKEN = "durable_token"  # noqa: S105 - a name, not a secret


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Which timer a message runs, in which version, and the token that names this delivery of it."""

    timer_id: UUID
    call_id: UUID
    token: str

    @classmethod
    def of(cls, headers: Mapping[str, Any]) -> Delivery | None:
        """Read a message's headers; None for a message that takes no lease."""
        if not headers.get("durable_leased"):
            return None
        try:
            timer_id = UUID(str(headers["durable_timer"]))
            call_id = UUID(str(headers.get("durable_call") or timer_id))
        except (KeyError, ValueError):
            return None  # somebody else's header of that name: a plain message
        return cls(timer_id=timer_id, call_id=call_id, token=headers.get(TOKEN) or new_token())

    @property
    def elsewhere(self) -> bool:
        """True in a pool process: another one, the parent, has received the message and outlives us."""
        return self.token.partition("-")[0] != str(os.getpid())


def new_token() -> str:
    """A token of the process that receives the message; Celery carries it to the one that runs the body."""
    return f"{os.getpid()}-{uuid4().hex}"


class Deliveries:
    """The requests of this worker that may hold a lease, by token; an entry goes away with its request.

    Not Celery's ``state.requests``: that is keyed by task id, and a skipped
    duplicate takes the running task out of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def add(self, token: str, request: Any) -> None:
        """Note a request."""
        with self._lock:  # the heartbeat's thread iterates
            self._requests[token] = request

    def get(self, token: str) -> Any:
        """The request of a token; None if it is not in this process."""
        with self._lock:
            return self._requests.get(token)

    def requests(self) -> list[Any]:
        """All requests that are still alive."""
        with self._lock:
            return list(self._requests.values())


#: Of this process.
DELIVERIES = Deliveries()
