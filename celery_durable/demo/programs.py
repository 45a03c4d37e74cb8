"""The demo's processes: started with a log each, ended by their pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


class Program:
    """One ``celery -A celery_durable.demo.app …`` process."""

    def __init__(self, name: str, folder: Path, env: Mapping[str, str], *arguments: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "celery", "-A", "celery_durable.demo.app", *arguments]
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                cwd=folder, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def running(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def says(self, text: str) -> bool:
        """Whether its log holds `text`."""
        return text in self.log.read_text(errors="replace")

    def kill(self) -> None:
        """``kill -9``."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Ask it to end; insist after ten seconds."""
        if self.running():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
