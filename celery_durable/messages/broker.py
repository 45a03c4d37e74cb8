"""One broker connection with hard time limits.

Kombu and the client libraries below it wait without limit in several places
(a blocked RabbitMQ, ``close()``, a declaration).  Two things bound them here:
socket timeouts, and a timer that cuts the sockets when the time of the whole
call is up, which ends every wait at once.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from amqp.exceptions import FrameSyntaxError
from kombu import Connection, Queue
from kombu.exceptions import SerializationError
from kombu.transport.pyamqp import Transport as AMQPTransport

from .delivery import BrokerUnavailable, Outcome

if TYPE_CHECKING:
    from celery import Celery


#: Seconds between a publisher's own deadline and the cut.
GRACE = 0.2

#: What client libraries raise for a message that they cannot write down.
UNENCODABLE = (
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    struct.error,
    SerializationError,
    FrameSyntaxError,
)


class Broker:
    """Holds the connection of one publisher and cuts it.

    Arguments:
        app: whose write connection to use.
        timeout: seconds that one call may take; connecting may take half of it.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app = app
        self.timeout = timeout
        self.closed = False
        #: Changes with every connection.
        self.generation = 0
        #: The time of the current call was up, and the sockets were cut.
        self.overdue = False
        self._connection: Connection | None = None
        self._channels: list[Any] = []
        self._wire: Any = None
        template = app.connection_for_write()
        #: The transport's class; asking for it connects to nothing.
        self.transport: type[Any] = template.get_transport_cls()
        #: Where to, without the password.
        self.uri: str = template.as_uri()

    @contextmanager
    def limited(self) -> Iterator[float]:
        """Cut the connection when the time is up; gives the deadline on the monotonic clock."""
        self.overdue = False
        done = threading.Event()

        def cut() -> None:
            if not done.is_set():
                self.overdue = True
                self.cut()

        # A little later than the deadline that the publishers keep by themselves where they can.
        timer = threading.Timer(self.timeout + GRACE, cut)
        timer.daemon = True
        timer.start()
        try:
            yield time.monotonic() + self.timeout
        finally:
            done.set()
            timer.cancel()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def connect(self) -> Connection:
        """The connection, made if there is none.

        Raises:
            BrokerUnavailable: it cannot be made, or the publisher is closed.
        """
        if self.closed:
            raise BrokerUnavailable("the publisher is closed")
        if self._connection is not None:
            return self._connection
        connection = self._app.connection_for_write(connect_timeout=self.timeout / 2, transport_options=self._limits())
        self._connection = connection
        try:
            # Each host once, none twice, and no sleep between: waiting is the caller's business.
            connection.ensure_connection(
                max_retries=max(len(connection.alt) - 1, 0),
                interval_start=0,
                interval_step=0,
                interval_max=0,
                timeout=self.timeout / 2,  # type: ignore[arg-type]  # a float is compared all the same
            )
            self._wire = getattr(connection.connection, "transport", None)
        except Exception as exc:  # transports raise what they like; whatever it is, nothing was sent
            self.drop()
            raise self.unavailable(exc) from exc
        self.generation += 1
        return connection

    def channel(self) -> Any:
        """A new channel of the connection.

        Raises:
            BrokerUnavailable: it cannot be opened.
        """
        connection = self.connect()
        try:
            channel = connection.channel()
        except Exception as exc:  # as in connect()
            self.drop()
            raise self.unavailable(exc) from exc
        self._channels.append(channel)
        return channel

    def reason(self, exc: BaseException | str) -> str:
        """What to tell the operator about an error of this call."""
        if self.overdue or isinstance(exc, TimeoutError):
            return f"no answer within {self.timeout:g} s"
        return str(exc) or repr(exc)

    def unavailable(self, exc: BaseException | str) -> BrokerUnavailable:
        """The error that says why nothing can be sent."""
        return BrokerUnavailable(f"{self.uri}: {self.reason(exc)}")

    def cut(self) -> None:
        """Shut the sockets down: every wait on them ends.  Takes no lock, allocates little."""
        for each in self._sockets():
            if each is None:
                continue
            with suppress(OSError):
                # Not each.shutdown(): a TLS socket would drop its state under the thread that reads it.
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    def drop(self) -> None:
        """Give up the connection without asking the broker; the next call makes a new one."""
        self.cut()
        connection, self._connection = self._connection, None
        self._channels, self._wire = [], None
        if connection is not None:
            # Whatever a client library raises over a dead socket, the connection is gone.
            with suppress(Exception):
                connection.collect(socket_timeout=0.1)

    def close(self) -> None:
        """Drop for good."""
        self.closed = True
        self.drop()

    def abandon(self) -> None:
        """Cut for good; the call in progress cleans up."""
        self.closed = True
        self.cut()

    def outcome(self, exc: BaseException) -> Outcome | None:
        """What an error of one message means; None if the connection is of no more use."""
        connection = self._connection
        if self.overdue or self.closed or connection is None:
            return None
        if isinstance(exc, (*connection.connection_errors, OSError)):
            return None
        if isinstance(exc, tuple(connection.channel_errors)):
            return Outcome.RETURNED
        if isinstance(exc, UNENCODABLE):
            return Outcome.REFUSED
        return Outcome.FAILED

    def alive(self, channel: Any) -> bool:
        """Whether Redis answers: tells a message that cannot be written down from a connection that is gone."""
        try:
            return bool(channel.client.ping())
        except Exception:  # whatever it is, it is no answer
            return False

    def _limits(self) -> dict[str, Any]:
        options = self._app.conf.broker_transport_options or {}
        limit = self.timeout / 2
        if issubclass(self.transport, AMQPTransport):
            # A TLS handshake ignores connect_timeout, but not these.
            names = ["read_timeout", "write_timeout"]
        elif self.transport.driver_type == "redis":
            names = ["socket_timeout", "socket_connect_timeout"]
        else:
            return {}
        return {name: min(options.get(name) or limit, limit) for name in names}

    def _sockets(self) -> Iterator[Any]:
        """The open sockets of py-amqp's transport or of redis-py's pools, whichever there are."""
        with suppress(AttributeError):
            yield self._wire.sock
        for channel in list(self._channels):
            for pool in (getattr(channel, "_pool", None), getattr(channel, "_async_pool", None)):
                for name in ("_available_connections", "_in_use_connections"):
                    for each in tuple(getattr(pool, name, ())):
                        yield getattr(each, "_sock", None)


class Queues:
    """Declares queues as a publishing Celery does, each once per channel.

    Arguments:
        app: whose ``task_queues`` to use.
        broker: whose connection the channel belongs to.
        channel: to declare on.
    """

    def __init__(self, app: Celery, broker: Broker, channel: Any) -> None:
        self._app = app
        self._broker = broker
        self._channel = channel
        self._declared: set[str] = set()

    def declare(self, name: str | None) -> str:
        """Declare a queue with its exchange and binding.

        Returns:
            Why it cannot be, or the empty string.

        Raises:
            Exception: whatever the client library raises when the connection broke.
        """
        if name is None or name in self._declared:
            return ""
        try:
            queue: Queue = self._app.amqp.queues[name]
        except KeyError:
            return f"queue {name!r} is not in task_queues, and task_create_missing_queues is off"
        try:
            queue.bind(self._channel).declare()
        except Exception as exc:  # sorted out by the broker's own error classes
            if self._broker.outcome(exc) is None:
                raise
            return f"queue {name!r} cannot be declared: {exc}"
        self._declared.add(name)
        return ""

    def forget(self, name: str | None) -> None:
        """Declare `name` again before its next message."""
        self._declared.discard(name or "")
