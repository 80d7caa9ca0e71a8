"""A small Hugging Face hub on this machine, for real downloads by huggingface_hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    """The part of the interface of the hub that downloading one repository uses."""

    kind: str
    repository: str
    files: dict[str, bytes]
    requests: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.requests.append(f"{self.command} {path}")
        about = f"/api/{self.kind}/{self.repository}"
        prefix = "" if self.kind == "models" else f"/{self.kind}"
        name = path.removeprefix(f"{prefix}/{self.repository}/resolve/{COMMIT}/")
        if path in (f"{about}/revision/main", f"{about}/revision/v1"):
            siblings = [{"rfilename": name} for name in self.files]
            self.reply({"id": self.repository, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        elif path == f"{about}/tree/{COMMIT}":
            sizes = {name: len(data) for name, data in self.files.items()}
            self.reply([{"type": "file", "path": name, "size": sizes[name], "oid": self.mark(name)} for name in sizes])
        elif name in self.files:
            self.reply(self.files[name], {"ETag": f'"{self.mark(name)}"', "X-Repo-Commit": COMMIT})
        else:
            self.reply({"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}, status=404)

    def mark(self, name: str) -> str:
        return hashlib.sha1(self.files[name]).hexdigest()

    def reply(self, body: object, headers: dict[str, str] | None = None, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def hub_of(kind: str, repository: str, files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve one repository of datasets or models; yields the address and the list of requests so far."""
    requests: list[str] = []
    handler = type("OwnHub", (_Hub,), {"kind": kind, "repository": repository, "files": files, "requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
        server.shutdown()
        thread.join()


def run_beside(script: str, address: str, home: Path) -> list[str]:
    """Run a script with this hub and without data of the user; returns the lines it prints."""
    hidden = ("HF_", "HUGGING", "CLASSWISE_DATA")
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(hidden)}
    environment = {
        **{name: value for name, value in kept.items() if not name.lower().endswith("_proxy")},
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
