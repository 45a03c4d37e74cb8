"""The private servers start, serve, break and stop as the other tests expect of them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from celery import Celery
from kombu import Connection

from tests.servers.brokers import RabbitServer, ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.private import Private
from tests.servers.processes import CeleryTestSetup, Cluster
from tests.servers.proxy import Proxy
from tests.servers.waiting import eventually


@pytest.fixture
def end() -> Iterator[Any]:
    """Ends what a test has made for itself."""
    mine: list[Private] = []

    def remember(server: Any) -> Any:
        mine.append(server)
        return server

    yield remember
    for server in mine:
        server.teardown()
        assert not server.alive()
        assert not server.folder.exists()


def version(server: PostgresServer) -> str:
    with psycopg.connect(server.dsn("postgres")) as connection:
        row = connection.execute("show server_version").fetchone()
    assert row is not None
    return str(row[0])


def test_postgres_keeps_its_rows_over_a_kill(end: Any) -> None:
    server = end(PostgresServer("18")).start()
    assert version(server).startswith("18.")
    name = server.create_database()
    with psycopg.connect(server.dsn(name)) as connection:
        connection.execute("create table kept ()")
    server.kill9()
    with pytest.raises(psycopg.OperationalError):
        version(server)
    server.start()
    server.restart(signal.SIGQUIT)
    with psycopg.connect(server.dsn(name)) as connection:
        connection.execute("select from kept")
    server.drop_database(name)


def test_the_systems_postgres(postgres15: PostgresServer) -> None:
    assert version(postgres15).startswith("15.")


def test_databases_are_apart(postgres: PostgresServer, database_url: str) -> None:
    other = postgres.create_database()
    assert other not in database_url
    postgres.drop_database(other)


def test_valkey_can_be_frozen_and_killed(end: Any) -> None:
    server = end(ValkeyServer()).start()
    with server.client() as client:
        client.set("key", "value")
    server.pause()
    with redis.Redis(port=server.port, socket_timeout=0.3, retry=None) as client, pytest.raises(redis.TimeoutError):
        client.get("key")
    server.resume()
    with server.client() as client:
        assert client.get("key") == b"value"
    server.kill9()
    server.start()
    with server.client() as client:
        assert client.get("key") is None


def test_a_valkey_that_keeps(end: Any) -> None:
    server = end(ValkeyServer(persistent=True)).start()
    with server.client() as client:
        client.set("key", "value")
    server.restart()
    with server.client() as client:
        assert client.get("key") == b"value"


def test_rabbitmq_is_killed_and_comes_back(end: Any) -> None:
    server = end(RabbitServer()).start()
    url = server.create_vhost()
    assert server.node in server.ctl("status")
    server.kill9()
    with pytest.raises(OSError, match="refused"), Connection(url) as connection:
        connection.connect()
    server.start()
    with Connection(url) as connection:
        connection.connect()


def test_the_proxy_goes_deaf_and_cuts(valkey: ValkeyServer) -> None:
    proxy = Proxy(valkey.port)
    try:
        with redis.Redis(port=proxy.port, socket_timeout=0.3, retry=None) as client:
            assert client.ping()
            proxy.mode = "blackhole"
            with pytest.raises(redis.TimeoutError):
                client.ping()
            assert proxy.swallowed
            proxy.mode = "forward"
            assert client.ping()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as plain:
            plain.sendall(b"PING\r\n")
            assert plain.recv(100) == b"+PONG\r\n"
            proxy.cut()
            assert plain.recv(100) == b""
    finally:
        proxy.close()


class TestSetup:
    """Programs as clusters of nodes; no beat here, so that only Celery's own parts are needed."""

    @pytest.fixture
    def celery_beat_cluster(self) -> Cluster:
        return Cluster()

    def test_a_worker_is_killed_and_comes_back(self, celery_setup: CeleryTestSetup) -> None:
        assert celery_setup.ready()
        worker = celery_setup.worker
        assert celery_setup.app.send_task("plain.add", (1, 2)).get(timeout=20) == 3
        children = worker.children()
        assert len(children) == 2
        worker.kill()
        eventually(lambda: not any(map(_running, children)), message="its pool has ended with it")
        waiting = celery_setup.app.send_task("plain.add", (3, 4))
        worker.restart()
        worker.wait_for_log("plain.add")
        assert waiting.get(timeout=20) == 7


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_worker_in_a_thread_is_celerys_own(celery_app: Celery, celery_worker: Any) -> None:
    assert celery_worker.app is celery_app
    assert celery_app.main == "celery.tests"
