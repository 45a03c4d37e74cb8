"""Options and headers, and values that fit few of them."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

#: Options of apply_async, of what it calls, and of what it passes on.
OPTIONS = (
    "queue", "exchange", "routing_key", "priority", "expires", "delivery_mode", "headers", "stamped_headers", "time_limit",
    "soft_time_limit", "serializer", "compression", "link", "link_error", "chain", "chord", "group_id", "group_index",
    "root_id", "parent_id", "shadow", "retries", "retry", "retry_policy", "reply_to", "correlation_id", "message_id",
    "app_id", "user_id", "type", "timestamp", "cluster_id", "content_type", "content_encoding", "mandatory", "immediate",
    "declare", "add_to_parent", "task_id", "argsrepr", "kwargsrepr", "ignore_result", "replaced_task_nesting", "timeout",
    "confirm_timeout", "expiration", "producer", "publisher", "connection", "router", "route_name", "task_type",
    "exchange_type", "body", "name", "args", "kwargs", "lang", "task", "id", "eta", "countdown", "delivery_tag",
    "delivery_info", "create_sent_event", "result_cls", "stamps", "x-mine", "durable_timer",
)  # fmt: skip
#: What a worker reads, and what RabbitMQ and Kombu read beside it.
HEADERS = (
    "task", "id", "lang", "argsrepr", "kwargsrepr", "expires", "eta", "retries", "timelimit", "group", "group_index",
    "root_id", "parent_id", "origin", "shadow", "ignore_result", "replaced_task_nesting", "stamped_headers", "stamps",
    "compression", "delivery_info", "hostname", "reply_to", "chord", "errbacks", "callbacks", "properties", "headers",
    "redelivered", "called_directly", "CC", "BCC", "durable_timer", "method", "x" * 300, "a\x00b", "\ud800", "mine",
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, 5, -5, 2**70, 1.5, float("nan"), float("inf"), "", "x", "-1", "2090", "a\x00b", "a\ud800", "x" * 70_000, b"x",
    b"\xff", [], [1], ["x"], ("x", 2), [None], [[1]], [{}], {}, {"a": 1}, {1: 2}, {"task": "x"}, {"a"}, object(), lambda: 1,
    Decimal("1.5"), timedelta(1), datetime(2090, 1, 1), uuid.UUID(int=7),
)  # fmt: skip
