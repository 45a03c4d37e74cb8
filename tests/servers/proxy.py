"""A TCP proxy that can go deaf, cut its connections, or take offence at what it reads."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal


class Proxy:
    """Forwards a port of 127.0.0.1 to another.

    Modes: ``forward``; ``blackhole`` takes connections and bytes and answers
    nothing; :meth:`cut` breaks every open connection at once.  A connection
    whose client sends the bytes of `poison` breaks before they are forwarded.
    """

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.mode: Literal["forward", "blackhole"] = "forward"
        #: Connections taken so far, and bytes swallowed: a fault test shows by them that its fault fired.
        self.connections = 0
        self.swallowed = 0
        self.poison: bytes | None = None
        #: Connections that poison has broken.
        self.poisoned = 0
        self._open: set[socket.socket] = set()
        self._closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink, source is client), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, tasting: bool) -> None:
        before = b""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if tasting and self.poison is not None:
                    if self.poison in before + data:
                        self.poisoned += 1
                        break
                    before = data[-len(self.poison) :]
                if self.mode == "blackhole":
                    self.swallowed += len(data)
                    continue
                sink.sendall(data)
        for each in (source, sink):
            self._open.discard(each)
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        """Break every open connection."""
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening, and break what is open."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
