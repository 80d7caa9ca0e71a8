"""ONNX models return the logits of the original network and are attacked without gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import classwise as cw
from classwise.cli import app
from classwise.core.errors import InputError
from classwise.core.model_calls import has_gradients
from classwise.models.load import load_model

onnx = pytest.importorskip("onnx", reason="needs onnx to write the files")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
FEATURES, CLASSES = 16, 3


def write(path: Path, shape: list[int | str | None] | None = None, external: str | None = None) -> torch.nn.Linear:
    """A linear classifier of 1x4x4 images, and the same in torch."""
    from onnx import TensorProto, helper, numpy_helper

    torch.manual_seed(4)
    linear = torch.nn.Linear(FEATURES, CLASSES)
    weight = numpy_helper.from_array(linear.weight.detach().numpy(), "weight")
    bias = numpy_helper.from_array(linear.bias.detach().numpy(), "bias")
    if external is not None:
        onnx.external_data_helper.set_external_data(weight, external)
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["image"], ["flat"]),
            helper.make_node("Gemm", ["flat", "weight", "bias"], ["logits"], transB=1),
        ],
        "linear",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 4, 4] if shape is None else shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        [weight, bias],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return linear


@pytest.fixture
def data(tmp_path: Path):
    """Images that the classifier predicts correctly, with enough margin for an attack."""
    linear = write(tmp_path / "model.onnx")
    x = torch.from_numpy(np.random.default_rng(0).random((60, 1, 4, 4), dtype=np.float32))
    with torch.no_grad():
        y = linear(x.flatten(1)).argmax(1)
    return f"onnx:{tmp_path / 'model.onnx'}", linear, (x, y)


@pytest.mark.parametrize("shape", [["batch", 1, 4, 4], [None, 1, 4, 4], [7, 1, 4, 4], [1, 1, 4, 4]], ids=str)
def test_logits_equal_those_of_the_network(tmp_path, shape):
    linear = write(tmp_path / "model.onnx", shape)
    model = load_model(f"onnx:{tmp_path / 'model.onnx'}")
    x = torch.rand(10, 1, 4, 4)
    with torch.no_grad():
        assert torch.allclose(model(x), linear(x.flatten(1)), atol=1e-5)
    assert not has_gradients(model)
    assert has_gradients(linear)


def test_black_box_attacks_break_the_same_images_as_in_torch(data):
    """The verdicts are those of the same network in torch, example by example."""
    spec, linear, images = data
    asked = {"attacks": ["square:queries=200", "nes:iterations=5,population=10"], "eps": 0.1, "engine": "eager"}
    report = cw.evaluate(spec, images, **asked)
    theirs = cw.evaluate(torch.nn.Sequential(torch.nn.Flatten(), linear), images, **asked)
    assert report["natural"].overall.value == 100
    assert report["square"].overall.value < 80
    for key in ("square", "nes"):
        assert report[key].overall.value == theirs[key].overall.value
    assert report.attacks["square"].backwards == 0
    (finding,) = [finding for finding in report.sanity.findings if finding.code == "not-probed"]
    assert "has no gradients" in finding.text


@pytest.mark.parametrize("attack", ["pgd", "autoattack", "fast", "temperature-pgd", "fab"])
def test_attacks_with_gradients_are_refused(data, attack, tmp_path):
    spec, _, images = data
    with pytest.raises(
        InputError, match=r"needs gradients, but the model has no gradients: use nattack, nes, spsa, square, transfer"
    ):
        cw.evaluate(spec, images, attacks=["square", attack], eps=0.1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_backward_raises_an_error(data):
    spec, _, (x, y) = data
    with pytest.raises(InputError, match="has no gradients"):
        cw.attacks.PGD(eps=0.1)(load_model(spec), x, y)


def test_files_have_different_fingerprints(tmp_path, data):
    from classwise.models.weights import digest_model

    write(tmp_path / "other.onnx", [5, 1, 4, 4])
    models = [load_model(spec) for spec in (data[0], data[0], f"onnx:{tmp_path / 'other.onnx'}")]
    marks = [digest_model(model) for model in models]
    assert marks[0] == marks[1] != marks[2]


def test_command_prints_a_one_line_error(data, tmp_path):
    factory = tmp_path / "images.py"
    factory.write_text("import torch\ndef make():\n    return torch.rand(6, 1, 4, 4), torch.arange(6) % 3\n")
    words = ["evaluate", "--model", data[0], "--data", f"{factory}:make", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert "pgd needs gradients, but the model has no gradients: use " in done.stderr
    assert CliRunner().invoke(app, [*words, "--attack", "square:queries=5"]).exit_code == 0


@pytest.mark.parametrize("content", [b"", b"text", b"\x08\x09" * 1000, bytes(100)], ids=repr)
def test_invalid_onnx_files(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not an ONNX model that onnxruntime can run") as caught:
        load_model(f"onnx:{path}")
    assert "\n" not in str(caught.value)


def test_inputs_other_than_images(tmp_path):
    write(tmp_path / "model.onnx", ["batch", 16])
    with pytest.raises(InputError, match="expected one batch of images"):
        load_model(f"onnx:{tmp_path / 'model.onnx'}")


def test_external_weights_outside_the_folder_are_refused(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(4 * FEATURES * CLASSES))
    (tmp_path / "inner").mkdir()
    for place in ("../secret", str(tmp_path / "secret")):
        write(tmp_path / "inner" / "model.onnx", external=place)
        with pytest.raises(InputError, match="is not an ONNX model that onnxruntime can run"):
            load_model(f"onnx:{tmp_path / 'inner' / 'model.onnx'}")
    (tmp_path / "inner" / "weights").write_bytes(bytes(4 * FEATURES * CLASSES))
    write(tmp_path / "inner" / "model.onnx", external="weights")
    assert load_model(f"onnx:{tmp_path / 'inner' / 'model.onnx'}")(torch.rand(1, 1, 4, 4)).shape == (1, CLASSES)
