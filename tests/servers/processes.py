"""Celery programs as local processes, in the vocabulary that Celery's own end-to-end tests use.

A :class:`CeleryTestSetup` has a broker, a backend, a cluster of workers and a
cluster of beats, each node with ``ready``, ``logs``, ``wait_for_log``, ``kill``,
``restart`` and ``teardown``; the nodes are processes instead of containers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from celery import Celery

from tests.servers.private import Private
from tests.servers.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]


class CeleryNode(Private):
    """One ``celery -A module …`` process."""

    ready_line = ""

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        super().__init__(arguments[0])
        self._command = [sys.executable, "-m", "celery", "-A", module, *arguments]
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", **(env or {})}
        self._seen = 0

    def name(self) -> str:
        """What to call it in a message."""
        return self.folder.name

    def start(self, *, wait: bool = True) -> CeleryNode:
        """Start it, and wait until it says that it is ready."""
        self._seen = len(self.logs())
        self.spawn(self._command, env=self._env)
        if wait:
            self.wait_for_log(self.ready_line)
        return self

    def ready(self) -> bool:
        """Whether it has said that it is ready since its last start."""
        return self.ready_line in self.logs()[self._seen :]

    def wait_for_log(self, text: str, timeout: float = 30.0) -> None:
        """Wait until `text` stands in what it has written since its last start.

        Raises:
            AssertionError: with the whole log, when it does not, or when the process has ended without it.
        """

        def said() -> bool:
            if text in self.logs()[self._seen :]:
                return True
            assert self.alive(), f"{self.name()} ended ({self.process and self.process.returncode}): {self.logs()}"
            return False

        try:
            eventually(said, timeout=timeout)
        except AssertionError as exc:
            raise AssertionError(f"{text!r} not in the log of {self.name()}: {exc}\n{self.logs()}") from None

    def restart(self, number: int = signal.SIGTERM) -> None:
        """End it and start it again."""
        self.end(number)
        self.start()

    def stop(self) -> int | None:
        """Ask it to end, and wait; returns its exit code."""
        return self.end()


class CeleryTestWorker(CeleryNode):
    """A prefork worker, unless told otherwise."""

    ready_line = " ready."

    def __init__(
        self, module: str, *arguments: str, env: Mapping[str, str] | None = None, concurrency: int = 2
    ) -> None:
        given = arguments or ("-P", "prefork")
        super().__init__(
            module,
            ("worker", "-l", "INFO", "-c", str(concurrency), "--without-gossip", "--without-mingle", *given),
            env,
        )

    def children(self) -> list[int]:
        """The pids of its pool."""
        return [child.pid for child in psutil.Process(self.pid).children()]


class CeleryTestBeat(CeleryNode):
    """A beat with the durable scheduler."""

    ready_line = "beat: Starting..."

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__(module, ("beat", "-S", "durable", "-l", "INFO", "--pidfile=", *arguments), env)


@dataclass
class Cluster:
    """Several nodes of one kind."""

    nodes: list[CeleryNode] = field(default_factory=list)

    def __iter__(self) -> Iterator[CeleryNode]:
        return iter(self.nodes)

    def __getitem__(self, index: int) -> CeleryNode:
        return self.nodes[index]

    def start(self) -> None:
        """Start all that do not run yet, side by side, and wait until each is ready."""
        new = [node for node in self.nodes if not node.alive()]
        for node in new:
            node.start(wait=False)
        for node in new:
            node.wait_for_log(node.ready_line)

    def ready(self) -> bool:
        """Whether all of them are."""
        return all(node.ready() for node in self.nodes)

    def teardown(self) -> None:
        """End all of them."""
        for node in self.nodes:
            node.teardown()


@dataclass
class CeleryTestSetup:
    """Everything that one end-to-end test works with."""

    app: Celery
    broker: Private
    backend: Private
    worker_cluster: Cluster
    beat_cluster: Cluster

    @property
    def worker(self) -> CeleryNode:
        """The first worker."""
        return self.worker_cluster[0]

    @property
    def beat(self) -> CeleryNode:
        """The first beat."""
        return self.beat_cluster[0]

    def ready(self) -> bool:
        """Whether all nodes are."""
        return self.worker_cluster.ready() and self.beat_cluster.ready()

    def teardown(self) -> None:
        """End workers and beats; the servers belong to their fixtures."""
        self.beat_cluster.teardown()
        self.worker_cluster.teardown()
