"""What all private servers share: a folder, a free port, a process of ours that ends with us."""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_running: weakref.WeakSet[Private] = weakref.WeakSet()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        self._log: IO[bytes] | None = None
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
        self._log = self.log_file.open("ab")
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, env=env, user=user,
            cwd=cwd or self.folder, start_new_session=True, extra_groups=[] if user else None,
        )  # fmt: skip

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
        code = self.process.returncode
        if self._log is not None:
            self._log.close()
        return code

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
