"""Flags of a user's `train.py` and of a modified Megatron on PYTHONPATH."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from instep.arguments import extra
from instep.arguments.all_flags import find
from instep.arguments.parse import parse
from instep.errors import ConfigError
from tests.command_line import argv, make_folder

ROOT = Path(__file__).parents[2]
MEGATRON = """
import argparse, atexit

atexit.register(print, "Megatron has something else to say")

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    print("Megatron says something")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    group = parser.add_argument_group("ours")
    group.add_argument("--our-alpha", type=float, default=0.5)
    group.add_argument("--our-layers", type=int, nargs="+")
    group.add_argument("--our-switch", action="store_true")
    group.add_argument("--lr", type=float)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_args()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(extra, "_of_user", {})


def provider(*arguments, **more):
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument_group("mine").add_argument(*arguments, **more)
        return parser

    return add


def test_flags_of_a_provider_are_typed_and_have_defaults():
    extra.add(provider("--my-scale", type=float, default="0.25", help="a scale"), find)
    extra.add(provider("--my-names", "--my-name", nargs="*", default=["a"]), find)
    extra.add(provider("--no-mine", action="store_false", dest="mine"), find)
    extra.add(provider("--my-kind", choices=["x", "y"], action="append"), find)
    args = parse(argv())
    assert (args.my_scale, args.my_names, args.mine, args.my_kind, args.extra_flags) == (0.25, ["a"], True, None, [])
    words = ["--my-scale", "2", "--my-name", "b", "c", "--no-mine", "--my-kind", "y", "--my-kind=x"]
    args = parse([*argv(), *words])
    assert (args.my_scale, args.my_names, args.mine, args.my_kind) == (2.0, ["b", "c"], False, ["y", "x"])
    assert args.extra_flags == ["mine", "my_kind", "my_names", "my_scale"] and args.view({}).my_scale == 2.0
    with pytest.raises(ConfigError, match="'z' is not one of x, y(.|\n)*--my-kind"):
        parse([*argv(), "--my-kind", "z"])
    with pytest.raises(ConfigError, match="'big' could not convert(.|\n)*--my-scale"):
        parse([*argv(), "--my-scale", "big"])


@pytest.mark.parametrize(
    "arguments, more, message",
    [
        (("--lr",), {"type": float}, "--lr is a flag of instep"),
        (("--mine", "--max-tokens-per-gpu"), {}, "--mine is a flag of instep"),
        (("--pair",), {"nargs": 2}, "--pair"),
        (("--must",), {"required": True}, "--must"),
        (("--both",), {"action": argparse.BooleanOptionalAction}, "--both"),
    ],
)
def test_flags_that_cannot_be_handed_over_are_refused(arguments, more, message):
    with pytest.raises(ConfigError, match=f"{message}|form that instep does not read(.|\n)*{message}"):
        extra.add(provider(*arguments, **more), find)


def test_a_megatron_on_the_path_adds_its_flags(tmp_path, monkeypatch):
    file = tmp_path / extra.ARGUMENTS
    file.parent.mkdir(parents=True)
    file.write_text(MEGATRON)
    monkeypatch.syspath_prepend(tmp_path)
    args = parse([*argv(), "--our-alpha", "0.75", "--our-layers", "1", "2", "--our-switch", "--lr", "1e-3"])
    assert (args.our_alpha, args.our_layers, args.our_switch, args.lr) == (0.75, [1, 2], True, 1e-3)
    assert args.extra_flags == ["our_alpha", "our_layers", "our_switch"] and args.megatron_overrides == {}
    with pytest.raises(ConfigError, match="unknown flag"):
        parse([*argv(), "--our-beta", "1"])


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM: a checkout of core_v0.16.1; six, triton")
def test_every_flag_of_the_real_megatron_is_known(monkeypatch):
    records, why = extra._of_megatron(Path(os.environ["MEGATRON_LM"]))
    assert why == "" and len(records) > 600
    assert [name for name in records if find(name) is None] == []


def test_a_megatron_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    file = tmp_path / extra.ARGUMENTS
    file.parent.mkdir(parents=True)
    file.write_text("import a_package_that_is_not_here")
    monkeypatch.syspath_prepend(tmp_path)
    assert parse(argv()).extra_flags == []
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be imported: ModuleNotFoundError(.|\n)*--our-beta"):
        parse([*argv(), "--our-beta", "1"])


def test_train_py_reads_the_flags_of_pretrain_gpt(tmp_path):
    """A script of one's own gets checked arguments; what is wrong ends it as it ends `instep train`."""
    (tmp_path / "pretrain_gpt.py").write_text(
        "def extra_args_provider(parser):\n    parser.add_argument('--mine', type=int, default=3)\n    return parser\n"
    )
    code = "from train import parse_args, train\nfrom pretrain_gpt import extra_args_provider\n"
    code += "print(callable(train), parse_args(extra_args_provider).mine)\n"

    def run(*words):
        path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, *words]
        env = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    wrong = run(str(ROOT / "train.py"), "--mine", "many", "--num-rolout", "2")
    assert wrong.returncode == 2 and "--mine: 'many' invalid literal" in wrong.stderr, wrong.stderr
    assert "did you mean --num-rollout" in wrong.stderr and "Traceback" not in wrong.stderr
    missing = run("-c", code, "--mine", "4")
    assert missing.returncode == 2 and "--hf-checkpoint" in missing.stderr and "Traceback" not in missing.stderr
    (tmp_path / "pretrain_gpt.py").write_text("raise OSError('libcudart is not here')")
    broken = run(str(ROOT / "train.py"), "--num-rolout", "2")
    assert "pretrain_gpt adds no flags: OSError: libcudart is not here" in broken.stderr
    assert broken.returncode == 2 and "did you mean --num-rollout" in broken.stderr and "Traceback" not in broken.stderr
    helped = run(str(ROOT / "train.py"), "--help")
    assert helped.returncode == 0 and "--num-rollout" in helped.stdout
