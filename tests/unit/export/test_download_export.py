"""An export on a hub: downloaded by huggingface_hub from a small hub on this machine, then used without it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save

from classwise.models.load import build_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as downloading the files of one model takes."""

    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.asked.append(f"{self.command} {path}")
        name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
        if path in ("/api/models/org/tiny/revision/main", "/api/models/org/tiny/revision/v1"):
            siblings = [{"rfilename": name} for name in self.files]
            self.reply({"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            marks = {name: hashlib.sha1(data).hexdigest() for name, data in self.files.items()}
            self.reply(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": marks[name]}
                    for name, data in self.files.items()
                ]
            )
        elif name in self.files:
            data = self.files[name]
            self.reply(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.reply({"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}, status=404)

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


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str], torch.nn.Module]]:
    """The address of a hub with one export, what it was asked so far, and the model."""
    torch.manual_seed(3)
    model = build_model("digits-cnn", num_classes=3, in_channels=1).eval()
    config = {"schema": "classwise/model/1", "architecture": "digits-cnn", "num_classes": 3, "in_channels": 1}
    files = {
        "config.json": json.dumps({**config, "classes": ["a", "b", "c"]}).encode(),
        "model.safetensors": save(model.state_dict()),
        "model.py": b"raise SystemExit('run')",
        "pytorch_model.bin": b"a pickle",
    }
    asked: list[str] = []
    handler = type("ToyHub", (Hub,), {"files": files, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked, model
        server.shutdown()
        thread.join()


SCRIPT = """
import torch
from huggingface_hub import snapshot_download
from classwise.errors import InputError
from classwise.models.load import load_model

snapshot_download("org/tiny", allow_patterns=["config.json"])  # a cache that is not complete
for spec in ("hf:org/tiny", "hf:org/tiny@v1", "hf:org/tiny", "hf:org/absent"):
    try:
        with torch.no_grad():
            print(load_model(spec)(torch.full((1, 1, 8, 8), 0.5)).tolist())
    except InputError as error:
        print(error)
"""


def test_download(hub, tmp_path):
    address, asked, model = hub
    hidden = ("HF_", "HUGGING")
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(hidden)}
    environment = {
        **{name: value for name, value in kept.items() if not name.lower().endswith("_proxy")},
        "HF_ENDPOINT": address,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    *answers, absent = done.stdout.splitlines()
    with torch.no_grad():
        wanted = str(model(torch.full((1, 1, 8, 8), 0.5)).tolist())
    assert answers == [wanted] * 3
    assert absent.startswith("cannot download org/absent from the Hugging Face hub: ")
    fetched = sorted(line.rpartition("/")[2] for line in asked if line.startswith("GET /org/tiny/resolve/"))
    assert fetched == ["config.json", "model.safetensors"]  # once each, and neither code nor pickles
