"""A real download by huggingface_hub, from a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from data_files import encode, picture, write_shard

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as downloading the files of one data set takes."""

    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.asked.append(f"{self.command} {path}")
        resolve = f"/datasets/org/toy/resolve/{COMMIT}/"
        if path == "/api/datasets/org/toy/revision/main":
            siblings = [{"rfilename": name} for name in self.files]
            self.reply({"id": "org/toy", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        elif path == f"/api/datasets/org/toy/tree/{COMMIT}":
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            self.reply(listing)
        elif path.startswith(resolve) and path.removeprefix(resolve) in self.files:
            data = self.files[path.removeprefix(resolve)]
            self.reply(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.reply({"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}, status=404)

    def reply(self, body: object, headers: dict[str, str] | None = None, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with one data set, and what it was asked so far."""
    files = {"README.md": b"# toy"}
    for split, shards in (("train", 2), ("test", 1)):
        for shard in range(shards):
            path = tmp_path / "shard.parquet"
            # No two files alike: the hub's cache would fetch only one of them.
            write_shard(path, [encode(picture(shards + shard), "WEBP")], [shard])
            files[f"plain/{split}-{shard:05}-of-{shards:05}.parquet"] = path.read_bytes()
    asked: list[str] = []
    handler = type("ToyHub", (Hub,), {"files": files, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


SCRIPT = """
from dataclasses import replace
from classwise.data import DATASETS, DatasetCard, HubParquet, load_data
from classwise.data.sources import read
from classwise.errors import InputError

card = DatasetCard(name="toy", hub="org/toy", image_columns=("img",), classes=("a", "b"), mode="RGB", size=(6, 5))
DATASETS["toy"] = card
DATASETS["absent"] = replace(card, name="absent", hub="org/absent")
print(load_data("toy", split="train").labels.tolist())
print(len(read(HubParquet(card, "train"))))
for name in ("absent", "toy"):
    try:
        print(load_data(name, split="test").labels.tolist())
    except InputError as error:
        print(error)
"""


def test_download(hub, tmp_path):
    address, asked = hub
    hidden = ("HF_", "HUGGING", "CLASSWISE_DATA")
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(hidden)}
    environment = {
        **{name: value for name, value in kept.items() if not name.lower().endswith("_proxy")},
        "HF_ENDPOINT": address,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    train, again, absent, test = done.stdout.splitlines()
    assert (train, again, test) == ("[0, 1]", "2", "[0]")
    assert absent.startswith("absent: cannot download org/absent from the Hugging Face hub: ")
    assert "set CLASSWISE_DATA to a folder that holds org/absent, or show where it lies" in absent
    fetched = sorted(line.rpartition("/")[2] for line in asked if line.startswith("GET /datasets/"))
    assert fetched == [
        "test-00000-of-00001.parquet",
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
