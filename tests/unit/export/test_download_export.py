"""An export on a hub: downloaded by huggingface_hub from a small local hub, then used without it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save

from classwise.models.load import build_model
from small_hub import hub_of, run_beside


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str], torch.nn.Module]]:
    """The address of a hub with one export, its requests so far, and the model."""
    torch.manual_seed(3)
    model = build_model("digits-cnn", num_classes=3, in_channels=1).eval()
    config = {"schema": "classwise/model/1", "architecture": "digits-cnn", "num_classes": 3, "in_channels": 1}
    files = {
        "config.json": json.dumps({**config, "classes": ["a", "b", "c"]}).encode(),
        "model.safetensors": save(model.state_dict()),
        "model.py": b"raise SystemExit('run')",
        "pytorch_model.bin": b"a pickle",
    }
    with hub_of("models", "org/tiny", files) as (address, asked):
        yield address, asked, model


SCRIPT = """
import torch
from huggingface_hub import snapshot_download
from classwise.core.errors import InputError
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
    *answers, absent = run_beside(SCRIPT, address, tmp_path / "hub")
    with torch.no_grad():
        wanted = str(model(torch.full((1, 1, 8, 8), 0.5)).tolist())
    assert answers == [wanted] * 3
    assert absent.startswith("cannot download org/absent from the Hugging Face hub: ")
    fetched = sorted(line.rpartition("/")[2] for line in asked if line.startswith("GET /org/tiny/resolve/"))
    assert fetched == ["config.json", "model.safetensors"]  # once each, and neither code nor pickles
