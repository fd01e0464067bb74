"""The flags of Megatron that are handed through: with each megatron-core's configuration is another than without.

What follows from it on a rank shows `tests/distributed/test_megatron_flags.py`.
"""

import importlib.util
from dataclasses import fields
from typing import Any

import pytest
import torch

from instep.arguments import extra
from instep.arguments.all_flags import own_hooks, passed_through
from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.models.shape import ModelShape
from tests.command_line import argv, make_folder
from tests.distributed.helpers import RankPool

SHAPE = ModelShape(4, 64, 128, 4, 2, 16, 300, 512, 1e-6, True, True, False, {"rope_type": "default"})
VALUES = {"--recompute-modules": "mlp"}
NEEDS = {  # what megatron-core refuses a flag without
    "--recompute-modules": "--recompute-granularity selective",
    "--distribute-saved-activations": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2",
}


def test_a_spec_is_a_module_and_a_name(tmp_path, monkeypatch):
    """As Megatron has it, or as one path, which functions given to the Python API become."""
    make_folder(tmp_path, monkeypatch)
    for words in ("json.decoder JSONDecoder", "json.decoder.JSONDecoder"):
        args = parse(argv(f"--train-backend megatron --spec {words} --lr 1e-5"))
        assert args.spec == "json.decoder.JSONDecoder" and args.lr == 1e-5
        assert own_hooks(args) == [("--spec", "json.decoder.JSONDecoder")]
    assert parse(argv()).spec is None


def configured(settings: list[tuple[str, Args]]) -> list[list[Any]]:
    """The value of each attribute in a GPU's configurations that have it. Megatron-Core is imported in this process."""
    from instep.training.megatron import cpu_platform

    cpu_platform.install()
    from instep.training.megatron.config import configs

    found = []
    for attribute, args in settings:
        built = configs(args, SHAPE, torch.device("cuda"), torch.bfloat16)
        found.append([getattr(c, attribute) for c in built if attribute in {f.name for f in fields(c)}])
    return found


MODIFIED = """
import argparse

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--our-scale", dest="softmax_scale", type=float, default=0.5)
    parser.add_argument("--check-for-nan-in-grad", action="store_true")
    parser.add_argument("--our-layers", type=int, default=3)
    return (extra_args_provider(parser) or parser).parse_args()
"""


def test_a_flag_of_a_modified_megatron_that_names_a_field_sets_it(tmp_path, monkeypatch):
    """Of the model or of data parallelism; only where it is given, and one that names no field is for hooks alone."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    make_folder(tmp_path, monkeypatch)
    file = tmp_path / "modified" / extra.ARGUMENTS
    file.parent.mkdir(parents=True)
    file.write_text(MODIFIED)
    monkeypatch.syspath_prepend(tmp_path / "modified")
    given = parse(argv("--train-backend megatron --our-scale 0.25 --check-for-nan-in-grad --our-layers 2"))
    assert given.extra_flags == ["check_for_nan_in_grad", "our_layers", "softmax_scale"] and given.our_layers == 2
    names, other = ("softmax_scale", "check_for_nan_in_grad"), parse(argv("--train-backend megatron"))
    monkeypatch.undo()  # the process imports megatron-core alone
    with RankPool(1, megatron=True, group=False) as pool:
        (found,) = pool.run(configured, [(name, args) for args in (given, other) for name in names])
    assert found == [[0.25], [True], [None], [False]]


@pytest.mark.slow
def test_each_value_reaches_the_configuration(tmp_path, monkeypatch):
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    make_folder(tmp_path, monkeypatch)
    acting = [flag for flag in dict.fromkeys(passed_through().values()) if flag.status == "acts"]
    assert len(acting) >= 7
    settings = list[tuple[str, Args]]()
    for flag in acting:
        without = f"--train-backend megatron {NEEDS.get(flag.name, '')}"
        for words in (without, f"{without} {flag.name} {VALUES.get(flag.name, '')}"):
            settings.append((flag.attribute, parse(argv(words))))
    with RankPool(1, megatron=True, group=False) as pool:
        (values,) = pool.run(configured, settings)
    for flag, (_, args), without, found in zip(acting, settings[1::2], values[::2], values[1::2], strict=True):
        mine = args.megatron_overrides[flag.attribute]
        assert found and all(v == mine for v in found), (flag.name, mine, found)
        assert all(v != mine for v in without), (flag.name, mine, without)
