"""An S3 server in a process of its own: moto's, one request at a time, since moto by itself is not atomic.

Seen of moto 5.2.5: of 60 races of 16 creates with `If-None-Match: *`, one had two winners (it looks first and stores then), and of two
that store one name at the same time one is answered 500. As its code has it, a body may also be read while another thread computes its
ETag, both seeking in one file, and a listing walks a dictionary that grows. So requests take turns here. It checks no signatures.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import subprocess
import sys
import tempfile
import threading
from typing import Any

__all__ = ["ACCESS_KEY_ID", "REGION", "SECRET_ACCESS_KEY", "S3Server"]

ACCESS_KEY_ID = "AKIATESTSOFKVSTORE00"
SECRET_ACCESS_KEY = "secret-of-the-tests/of+the-object-store0"
REGION = "us-east-1"
START_S = 60.0
END_S = 20.0


class S3Server:
    """Starts at once; whoever made it ends it with `stop`.

    Attributes:
        endpoint: Its URL. The same after a restart.
    """

    def __init__(self) -> None:
        self._port = 0
        self._client: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, where it was before if it was: with no object and no bucket."""
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self._port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
            assert self._process.stdout is not None
            # Not `select`, which knows no descriptor above 1,023.
            waiting = select.poll()
            waiting.register(self._process.stdout, select.POLLIN)
            line = self._process.stdout.readline() if waiting.poll(1000 * START_S) else b""
            if not line.strip().isdigit():
                self.stop()
                log.seek(0)
                raise RuntimeError(f"the S3 server did not start: {log.read().decode(errors='replace')}")
        self._port = int(line)
        self.endpoint = f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> Any:
        """A boto3 client of it. It is closed with the server."""
        import boto3
        from botocore.config import Config

        if self._client is None:
            config = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0}, max_pool_connections=4)
            self._client = boto3.Session(ACCESS_KEY_ID, SECRET_ACCESS_KEY, region_name=REGION).client(
                "s3", endpoint_url=self.endpoint, config=config
            )
        return self._client

    def make_bucket(self, name: str) -> str:
        self.client().create_bucket(Bucket=name)
        return name

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        """Every object by its key."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [found["Key"] for page in pages for found in page.get("Contents", ())]
        return {key: self.client().get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}

    def restart(self, keep: bool = True) -> None:
        """End it with all connections and start it on the same port. Moto has no disk: `keep` carries the objects over."""
        buckets = [found["Name"] for found in self.client().list_buckets()["Buckets"]] if keep else []
        kept = {bucket: self.objects(bucket) for bucket in buckets}
        self.stop()
        self.start()
        for bucket, objects in kept.items():
            self.make_bucket(bucket)
            for key, body in objects.items():
                self.client().put_object(Bucket=bucket, Key=key, Body=body)

    def stop(self) -> None:
        """End it, as `kill -9` does. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=END_S)
            self._process = None


def serve(port: int) -> None:
    """Serve until the standard input ends: whoever started this is gone then."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    turn = threading.Lock()

    class Handler(MotoRequestHandler):  # type: ignore[misc]
        """Requests take turns; bodies are received before and sent after, so that a slow client holds nobody up.

        Connections stay open: werkzeug's own handler ends each after one answer.
        """

        # Head and body are two writes: the second would wait for the client's delayed acknowledgement of the first.
        disable_nagle_algorithm = True

        def run_wsgi(self) -> None:
            environ = self.make_environ()
            source = environ["wsgi.input"]
            length = -1 if environ.get("wsgi.input_terminated") else int(environ.get("CONTENT_LENGTH") or 0)
            environ["wsgi.input"] = io.BytesIO(source.read(length))
            said: list[Any] = []
            with turn:
                answer = self.server.app(environ, lambda *what: said.extend(what))
                body = b"".join(answer)
                if hasattr(answer, "close"):
                    answer.close()
            code, _, reason = said[0].partition(" ")
            self.send_response(int(code), reason)
            headers = {name.lower(): value for name, value in said[1]}
            if self.command != "HEAD" and code not in ("204", "304"):
                headers["content-length"] = str(len(body))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_request(self, *_: Any) -> None:
            """Say nothing."""

    # Without moto's dispatcher, which looks for all of its services on the disk at each request, as long as S3 itself takes.
    application = create_backend_app("s3")
    application.debug = False
    server = make_server("127.0.0.1", port, application, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, name="server", daemon=True).start()
    print(server.server_port, flush=True)  # noqa: T201
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
