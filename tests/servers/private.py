"""What all private servers share: a folder, a free port, a process of ours that ends with us."""

from __future__ import annotations

import atexit
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.servers.waiting import eventually

_running: set[Private] = set()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now.

    Below Linux's ephemeral range (32768 and up): while a server of that range is down, another connection can be
    given its port, and a client that tries to reconnect can even be connected to itself.
    """
    while True:
        # Not `random`: pytest-randomly seeds it alike in processes that run side by side.
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def unprivileged() -> str | None:
    """The user that a server shall run as, because we are root and it refuses to; None if we are not."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    return None


class Private:
    """One server process of our own; ended by its pid, at the latest when Python ends."""

    def __init__(self, prefix: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"cd-{prefix}-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.process: subprocess.Popen[bytes] | None = None
        _running.add(self)

    @property
    def log_file(self) -> Path:
        """Where the process writes."""
        return self.folder / "log"

    def logs(self) -> str:
        """What the process has written so far."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process is not None
        return self.process.pid

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def spawn(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, user: str | None = None,
        cwd: Path | str | None = None,
    ) -> None:  # fmt: skip
        """Start the process in a session of its own."""
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, user=user,
                cwd=cwd or self.folder, start_new_session=True, extra_groups=[] if user else None,
            )  # fmt: skip

    def ready(self) -> bool:
        """Whether it answers, and is the process that we started."""
        raise NotImplementedError

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until it is ready.

        Raises:
            AssertionError: with its log, at once when the process has ended.
        """

        def settled() -> bool:
            return not self.alive() or self.ready()

        try:
            eventually(settled, timeout=timeout, message=f"{self.folder.name} is ready", every=0.05)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.logs()}") from None
        assert self.alive(), f"{self.folder.name} ended at its start:\n{self.logs()}"

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.alive():
            os.kill(self.pid, number)

    def end(self, number: int = signal.SIGTERM, timeout: float = 15.0) -> int | None:
        """Ask the process to end, insist after `timeout` seconds; returns its exit code."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            os.kill(self.pid, number)
            if number == signal.SIGSTOP:
                return None
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.kill(self.pid, signal.SIGCONT)
                os.killpg(self.pid, signal.SIGKILL)
                self.process.wait(10)
        return self.process.returncode

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the process at once."""
        self.end(number)

    def teardown(self) -> None:
        """End the process and its whole session, and remove its folder."""
        if self.process is not None:
            self.end()
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # nothing of the session is left
        shutil.rmtree(self.folder, ignore_errors=True)
        _running.discard(self)


@atexit.register
def _end_all() -> None:
    for each in list(_running):
        each.teardown()
