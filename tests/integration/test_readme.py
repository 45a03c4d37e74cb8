"""The README's own program, run as the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from celery_durable import DurableTask
from celery_durable.settings import Settings
from celery_durable.store import embedded
from tests.servers.brokers import ValkeyServer
from tests.servers.processes import ROOT, CeleryTestBeat, CeleryTestWorker
from tests.servers.waiting import eventually


@pytest.fixture
def project() -> Iterator[Path]:
    # Not tmp_path: pytest makes that for its own user alone, and as root the private PostgreSQL runs as another.
    with tempfile.TemporaryDirectory(prefix="cd-readme-", dir="/tmp", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)
        embedded.stop(Path(name) / "var-postgres")


def test_the_first_program(project: Path, valkey: ValkeyServer) -> None:
    valkey.client().flushall()  # the program's queue is Celery's default one: other tests have left messages there
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = blocks[0].replace("redis://localhost/0", valkey.url).replace("redis://localhost/1", valkey.backend_url)
    program = program.replace("embedded:./var-postgres", f"embedded:{project / 'var-postgres'}")
    (project / "proj.py").write_text(program)
    env = {"PYTHONPATH": f"{project}{os.pathsep}{ROOT}"}

    def durable(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "proj", "durable", *arguments],
            env={**os.environ, **env}, cwd=project, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    durable("migrate")
    durable("check")
    nodes = [CeleryTestBeat("proj", env=env), CeleryTestWorker("proj", env=env)]
    try:
        for node in nodes:
            node.start()
        call = "charge.apply_at(timedelta(seconds=1), args=(42,), key='order-42-charge')"
        told = subprocess.run(
            [sys.executable, "-c", f"from proj import *; print({call}.id)"],
            env={**os.environ, **env}, cwd=project, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        timer_id = told.stdout.strip()
        eventually(lambda: '"succeeded"' in durable("timers", "show", timer_id, "--json"), message="it has run")
    finally:
        for node in nodes:
            node.teardown()


def test_the_second_program_names_what_exists() -> None:
    """Every name that the README imports can be imported."""
    text = (ROOT / "README.md").read_text()
    names = {name.strip() for line in re.findall(r"from celery_durable import (.*)", text) for name in line.split(",")}
    assert len(names) > 5
    import celery_durable

    for name in names:
        assert getattr(celery_durable, name) is not None
    assert names <= set(celery_durable.__all__)


def test_every_promise_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "README.md").read_text())
    assert len(named) > 10
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_setting_is_in_the_table() -> None:
    table = (ROOT / "README.md").read_text().partition("## Settings")[2].partition("## Words")[0]
    named = set(re.findall(r"`durable_(\w+)`", table))
    assert named == {each.name for each in fields(Settings)}


def test_the_defaults_that_differ_for_a_durable_task_are_the_ones_named() -> None:
    section = (ROOT / "README.md").read_text().partition("## What changes for a DurableTask")[2].partition("\n## ")[0]
    for said in ("autoretry_for=(Exception,)", "max_retries=3", "retry_backoff=1", "retry_backoff_max=600"):
        assert f"`{said}`" in section
        name, _, value = said.partition("=")
        assert getattr(DurableTask, name) == eval(value)
