"""A private PostgreSQL in a folder: started once, joined by all, there again after a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_durable.store import embedded, migrations
from celery_durable.store.database import Database
from tests.servers.waiting import eventually


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: pytest makes that for its own user alone, and as root the server runs as another.
    with tempfile.TemporaryDirectory(prefix="cd-embedded-", dir="/tmp", ignore_cleanup_errors=True) as name:
        path = Path(name) / "db"
        Path(name).chmod(0o755)
        yield path
        embedded.stop(path)


def test_started_joined_killed_and_there_again(folder: Path) -> None:
    url = embedded.resolve(f"embedded:{folder}")
    app = Celery("proj", set_as_current=False)
    app.conf.durable_database_url = f"embedded:{folder}"
    assert migrations.upgrade(Database.of(app), app_name="proj") == migrations.head(Database.of(app))
    Database.of(app).close()
    joined = subprocess.run(
        [sys.executable, "-c", f"from celery_durable.store.embedded import resolve; print(resolve('embedded:{folder}'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert joined.stdout.strip() == url

    pid = int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not _alive(pid), message="the server is gone")
    again = embedded.resolve(f"embedded:{folder}")
    with psycopg.connect(again.replace("+psycopg", "")) as connection:
        row = connection.execute("select count(*) from celery_durable.timer").fetchone()
    assert row == (0,)
    assert embedded.stop(folder)
    assert not embedded.stop(folder)


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


def test_many_processes_start_one_server(folder: Path) -> None:
    program = f"from celery_durable.store.embedded import resolve; print(resolve('embedded:{folder}'))"
    starting = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    urls = {each.communicate(timeout=90)[0].strip() for each in starting}
    assert len(urls) == 1
    assert urls.pop().startswith("postgresql+psycopg://")


def test_the_password_is_private(folder: Path) -> None:
    url = embedded.resolve(f"embedded:{folder}")
    assert (folder / "password").stat().st_mode & 0o077 == 0
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(url.replace("+psycopg", "").replace("postgres:", "postgres:x"), connect_timeout=3)


if os.geteuid() == 0:  # else the server runs as we do, and can enter what we can

    def test_a_folder_that_the_server_cannot_enter(tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        with pytest.raises(ImproperlyConfigured, match="cannot enter"):
            embedded.resolve(f"embedded:{tmp_path / 'db'}")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ImproperlyConfigured, match=r"cannot be used: .*file"):
        embedded.resolve(f"embedded:{tmp_path / 'file' / 'db'}")


def test_another_url_is_left_alone() -> None:
    assert embedded.resolve("postgresql://host/db") == "postgresql://host/db"
