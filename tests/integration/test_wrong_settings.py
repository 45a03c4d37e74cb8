"""A program that is started with a wrong setting says which in one line, and ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.servers.brokers import ValkeyServer
from tests.servers.processes import ROOT, CeleryTestWorker
from tests.servers.waiting import eventually

PROJECT = """
from celery import Celery
from celery_durable import DurableTask

app = Celery("wrong", broker={broker!r}, task_cls=DurableTask)
app.conf.update({setting!r})

@app.task
def work(): ...
"""


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"durable_database_url": "postgresql://user:hunter2@host:54x2/db"}, "durable_database_url cannot be read"),
        ({"durable_database_url": "embedded:/proc/no-folder-here"}, "Choose a folder"),
        ({"durable_leese": 5}, "Did you mean durable_lease?"),
    ],
)
def test_a_worker_says_it_and_ends(valkey: ValkeyServer, tmp_path: Path, setting: dict[str, object], said: str) -> None:
    (tmp_path / "wrong.py").write_text(PROJECT.format(broker=valkey.url, setting=setting))
    worker = CeleryTestWorker("wrong", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    try:
        worker.start(wait=False)
        eventually(lambda: not worker.alive(), message="it has ended")
        (line,) = [line for line in worker.logs().splitlines() if "cannot run durable tasks" in line]
        assert said in line
        assert "Traceback" not in worker.logs() and "hunter2" not in worker.logs()
        assert worker.process is not None and worker.process.returncode == os.EX_CONFIG
    finally:
        worker.teardown()
