"""Architectures of timm and torchvision equal those packages' models after normalization."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from classwise.core.errors import InputError
from classwise.models.load import build_model, load_model
from classwise.models.normalize import NORMALIZATIONS
from classwise.models.timm_torchvision import published_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_missing_package_is_named(monkeypatch):
    for spec, extra in (("timm:resnet18", "timm"), ("torchvision:resnet18", "torchvision")):
        for module in [name for name in sys.modules if name.partition(".")[0] == extra]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, extra, None)  # as Python marks what cannot be imported
        with pytest.raises(InputError, match=rf"pip install 'classwise\[{extra}\]'"):
            build_model(spec)


def test_torchvision_needs_a_file_of_weights():
    with pytest.raises(InputError, match="is an architecture without weights"):
        published_weights("torchvision:resnet18")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("timm:resnet18,size", "settings are key=value"),
        ("timm:resnet18,width=3", "unknown setting"),
        ("timm:resnet18,size=0", "size = '0'"),
        ("timm:resnet18,normalize=moon", "normalize = 'moon'"),
        ("timm:resnet18,num_classes=5", "has 5 outputs, but the data has 4 classes"),
    ],
)
def test_settings_are_checked_before_anything_is_imported(spec, said):
    with pytest.raises(InputError) as caught:
        build_model(spec, num_classes=4)
    assert said in str(caught.value)


class TestTimm:
    @pytest.fixture
    def timm(self):
        return pytest.importorskip("timm", reason="needs the extra timm", exc_type=(ImportError, RuntimeError))

    @pytest.fixture
    def file(self, timm, tmp_path):
        """Weights of a small network of timm with four classes, and the network."""
        torch.manual_seed(5)
        network = timm.create_model("resnet10t", num_classes=4, pretrained=False).eval()
        save_file(network.state_dict(), tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors", network

    def test_logits_equal_those_of_timm(self, file):
        path, network = file
        mean, std = (torch.tensor(network.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
        x = torch.rand(2, 3, 32, 32)
        model = load_model("timm:resnet10t", weights=path, num_classes=4, in_channels=3)
        with torch.no_grad():
            assert torch.equal(model(x), network((x - mean) / std))
            plain = load_model("timm:resnet10t,normalize=none", weights=path, num_classes=4)
            assert torch.equal(plain(x), network(x))
            larger = load_model("timm:resnet10t,normalize=none,size=48", weights=path, num_classes=4)
            resized = torch.nn.functional.interpolate(x, (48, 48), mode="bilinear")
            assert torch.allclose(larger(x), network(resized), atol=1e-5)

    def test_other_channels_have_no_normalization(self, timm):
        model = build_model("timm:resnet10t", num_classes=4, in_channels=1)
        assert model.normalize.mean.tolist() == [[[0.0]]]
        assert model(torch.rand(2, 1, 32, 32)).shape == (2, 4)
        with pytest.raises(InputError, match="is for 3 channels, not 1"):
            build_model("timm:resnet10t,normalize=cifar10", num_classes=4, in_channels=1)

    @pytest.mark.parametrize("name", ["resnet10", "hf-hub", "resnet10t.nobody", "../resnet10t", ""])
    def test_names_unknown_to_timm(self, timm, name):
        with pytest.raises(InputError):
            build_model(f"timm:{name}")

    def test_published_weights_come_from_the_hub_cache(self, timm, tmp_path):
        torch.manual_seed(6)
        network = timm.create_model("resnet10t.c3_in1k", pretrained=False).eval()
        folder = tmp_path / "models--timm--resnet10t.c3_in1k"
        (folder / "snapshots" / COMMIT).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
        save_file(network.state_dict(), folder / "snapshots" / COMMIT / "model.safetensors")
        code = (
            "import torch\nfrom classwise.models.load import load_model\n"
            "model = load_model('timm:resnet10t.c3_in1k,normalize=none')\n"
            "with torch.no_grad():\n    print(model(torch.full((1, 3, 32, 32), 0.25))[0, :5].tolist())\n"
        )
        environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        with torch.no_grad():
            assert done.stdout.strip() == str(network(torch.full((1, 3, 32, 32), 0.25))[0, :5].tolist())


class TestTorchvision:
    @pytest.fixture
    def models(self):
        reason = "needs the extra torchvision, in a version that goes with the installed torch"
        return pytest.importorskip("torchvision.models", reason=reason, exc_type=(ImportError, RuntimeError))

    def test_logits_equal_those_of_torchvision(self, models, tmp_path):
        if not hasattr(models, "get_model"):
            pytest.skip("this torchvision has no get_model")
        torch.manual_seed(5)
        network = models.get_model("shufflenet_v2_x0_5", weights=None, num_classes=4).eval()
        save_file(network.state_dict(), tmp_path / "model.safetensors")
        model = load_model("torchvision:shufflenet_v2_x0_5", weights=tmp_path / "model.safetensors", num_classes=4)
        mean, std = (torch.tensor(part).view(3, 1, 1) for part in NORMALIZATIONS["imagenet"])
        x = torch.rand(2, 3, 32, 32)
        with torch.no_grad():
            assert torch.equal(model(x), network((x - mean) / std))
        with pytest.raises(InputError, match="unknown model of torchvision"):
            build_model("torchvision:resnet19")
        with pytest.raises(InputError, match="takes images of 3 channels"):
            build_model("torchvision:resnet18", in_channels=1)
