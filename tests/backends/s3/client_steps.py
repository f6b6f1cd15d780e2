"""Steps with an open `S3fsClient`: what tests of it share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.memory import ItemMemory
from kvstore_sdk_backends.s3.s3fs_client import S3fsClient
from kvstore_sdk_backends.s3.settings import S3Settings

__all__ = ["KEY", "UNTOUCHED", "Ask", "Step", "asker", "failure", "getting", "memory_of", "some_bytes"]

Step = Callable[[S3fsClient], Awaitable[Any]]
Ask = Callable[..., Any]

KEY = "kv/v1/record"
UNTOUCHED = 0xA5
LIMIT_S = 60.0


def asker(endpoint: str | None, bucket: str) -> Ask:
    """What runs a step with an open client; further arguments are settings."""

    def run(step: Step, **options: Any) -> Any:
        given = {"endpoint": endpoint, "access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY, "region": REGION}
        return asyncio.run(_within(bucket, S3Settings(**(given | options)), step))

    return run


async def _within(bucket: str, settings: S3Settings, step: Step) -> Any:
    client = S3fsClient(bucket, settings)
    await client.open()
    try:
        async with asyncio.timeout(LIMIT_S):
            return await step(client)
    finally:
        await client.close()


def some_bytes(length: int, seed: int = 7) -> bytes:
    return random.Random(seed).randbytes(length)


def memory_of(data: bytes | bytearray) -> ItemMemory:
    return ItemMemory(memoryview(bytearray(data)))


def getting(size_bytes: int) -> tuple[bytearray, ItemMemory]:
    found = bytearray([UNTOUCHED]) * size_bytes
    return found, ItemMemory(memoryview(found))


def failure(ask: Ask, step: Step, **options: Any) -> AttemptError:
    with pytest.raises(AttemptError) as raised:
        ask(step, **options)
    return raised.value
