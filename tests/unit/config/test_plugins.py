"""User code by name: what is found, and the errors otherwise."""

from __future__ import annotations

import sys

import pytest

from classwise.config.plugins import call_attribute, is_attribute_spec, load_attribute
from classwise.core.errors import InputError, one_line


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write Python files into an empty working directory that is not on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_name_in_a_file(write):
    write("zoo/net.py", "def make():\n    return 41 + 1\n")
    assert load_attribute("zoo/net.py:make", "model")() == 42
    assert call_attribute("zoo/net.py:make", "model") == 42


def test_name_in_a_module_of_the_working_directory(write):
    write("my_zoo/__init__.py", "")
    write("my_zoo/nets.py", "class Nets:\n    @staticmethod\n    def tiny():\n        return 'tiny'\n")
    path = list(sys.path)
    assert call_attribute("my_zoo.nets:Nets.tiny", "model") == "tiny"
    assert sys.path == path


def test_file_may_import_its_directory_and_define_dataclasses(write):
    write("zoo/neighbor_of_net.py", "SIZE = 7\n")
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "from neighbor_of_net import SIZE\n"
    text += "@dataclass\nclass Net:\n    size: int = SIZE\ndef make(): return Net()\n"
    spec = write("zoo/net.py", text) + ":make"
    path = list(sys.path)
    assert call_attribute(spec, "model").size == 7
    assert sys.path == path


def test_files_of_the_same_name_are_separate_and_reloaded(write):
    one, two = write("a/net.py", "NAME = 'a'\n"), write("b/net.py", "NAME = 'b'\n")
    assert load_attribute(f"{one}:NAME", "model") == "a"
    assert load_attribute(f"{two}:NAME", "model") == "b"
    write("a/net.py", "NAME = 'edited'\n")
    assert load_attribute(f"{one}:NAME", "model") == "edited"


def test_installed_module_takes_precedence(write):
    write("colorsys.py", "HIDDEN = True\n")
    sys.modules.pop("colorsys", None)
    assert load_attribute("colorsys:rgb_to_hsv", "model")(0, 0, 0) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        ("", "net.py", "expected package.module:name or path/to/file.py:name"),
        ("", "net.py:", "expected package.module:name"),
        ("", ":make", "expected package.module:name"),
        ("", "gone.py:make", "no such file: gone.py"),
        ("", "net.py:make", "net.py does not define 'make'"),
        ("class A: pass\n", "net.py:A.make", "net.py does not define 'A.make'"),
        ("def broken(:\n", "net.py:make", "running net.py failed: SyntaxError"),
        ("raise OSError('no\\ndisk')\n", "net.py:make", "running net.py failed: OSError: no disk"),
        ("import sys\nsys.exit(3)\n", "net.py:make", "running net.py failed: SystemExit: 3"),
        ("import not_there_at_all\n", "net.py:make", "No module named 'not_there_at_all'"),
        ("make = 3\n", "net.py:make", "expected a function or class, found int"),
        ("def make(): return 1 / 0\n", "net.py:make", "calling it failed: ZeroDivisionError"),
        ("def make(size): pass\n", "net.py:make", "calling it failed: TypeError"),
        ("", "no_such_package.nets:make", "importing no_such_package.nets failed: ModuleNotFoundError"),
        ("", "runs/x:make", "'runs/x' is neither a module name nor a .py file"),
    ],
)
def test_failures_are_one_line_with_the_cause(write, text, spec, message):
    write("net.py", text)
    with pytest.raises(InputError) as caught:
        call_attribute(spec, "data")
    message = str(caught.value)
    assert message in message
    assert message.startswith(f"data {spec!r}: ")
    assert "\n" not in message


def test_failed_file_keeps_the_cause_and_leaves_no_module(write):
    before = set(sys.modules)
    with pytest.raises(InputError) as caught:
        load_attribute(write("net.py", "raise KeyError('x')\n") + ":make", "model")
    assert isinstance(caught.value.__cause__, KeyError)
    assert not [name for name in set(sys.modules) - before if "net" in name]


def test_interrupt_is_raised(write):
    with pytest.raises(KeyboardInterrupt):
        load_attribute(write("net.py", "raise KeyboardInterrupt\n") + ":make", "model")


def test_specs_with_settings_are_not_attributes():
    assert not is_attribute_spec("pgd:steps=3")
    assert not is_attribute_spec("resnet18")
    assert is_attribute_spec("C:\\zoo\\net.py:make")


def test_one_line_is_short():
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 1000), 50)) < 80
