"""Every place that lists algorithms has those of the catalog, and no module outside `algorithms` knows one by name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from instep.algorithms.advantages import ESTIMATORS
from instep.algorithms.advantages.groups import grpo
from instep.algorithms.catalog import ALGORITHMS, OFFLINE, Algorithm, algorithm_of, names_where
from instep.algorithms.losses.policy import FORMS
from instep.arguments.algorithm.rules import COMBINATIONS
from instep.arguments.all_flags import own_flags
from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.training.losses import LOSSES
from tests.command_line import argv, make_folder

PACKAGE = Path(__file__).parents[2] / "instep"
RECORDS = [*ALGORITHMS.values(), *OFFLINE.values()]


def test_the_registries_hold_what_the_records_name() -> None:
    assert {a.estimator.name for a in RECORDS if a.estimator} == set(ESTIMATORS)
    assert {a.loss.name for a in RECORDS if a.loss.type == "policy_loss"} == set(FORMS)
    assert {a.loss.type for a in RECORDS} | {"custom_loss"} == set(LOSSES)
    for command, algorithm in OFFLINE.items():
        assert algorithm.name == command and not algorithm.has_rewards and algorithm.loss.type != "policy_loss"
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.name == name and algorithm.has_rewards and algorithm.loss.type == "policy_loss"


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda a: a.name)
def test_what_a_record_says_of_its_functions(algorithm: Algorithm) -> None:
    estimator = algorithm.estimator
    compare = ESTIMATORS[estimator.name].compare
    assert estimator.compares_group == (compare is not None)
    assert estimator.divides_by_std == (compare is grpo)
    assert len(algorithm.paper) == 10 and algorithm.title and algorithm.loss.of_token
    for attribute in algorithm.defaults:
        assert any(flag.attribute == attribute for flag in own_flags().values())


def test_the_flags_offer_the_catalog() -> None:
    flags = own_flags()
    assert flags["--advantage-estimator"].choices == tuple(ALGORITHMS)
    assert flags["--advantage-estimator"].default == next(iter(ALGORITHMS))
    assert set(flags["--loss-type"].choices) == set(LOSSES)
    for combination in COMBINATIONS:
        assert set(combination.algorithms) <= set(ALGORITHMS)


def test_the_record_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, monkeypatch)
    for name, algorithm in ALGORITHMS.items():
        args = parse(argv(f"--advantage-estimator {name}"))
        assert algorithm_of(args) is algorithm
        assert (args.eps_clip, args.loss_type) == (algorithm.defaults.get("eps_clip", 0.2), "policy_loss")
        assert args.use_rollout_logprobs == (algorithm.loss.bounds == "divergence")
    for command, algorithm in OFFLINE.items():
        assert algorithm_of(Args(command=command, advantage_estimator="ppo")) is algorithm
    assert names_where(lambda estimator, loss: True) == tuple(ALGORITHMS)


def test_no_module_outside_knows_an_algorithm_by_name() -> None:
    """A comparison with a name, a list of names: what they stand for is a field of the record."""
    names = {*ALGORITHMS, *FORMS}
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(PACKAGE / "algorithms"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in names:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}")
    assert found == []


def test_the_catalog_imports_no_torch() -> None:
    code = "import sys, instep.algorithms.catalog; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_given_bound_is_the_upper_one_too_unless_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path, monkeypatch)
    for words, bounds in (("", (3e-4, 4e-4)), ("--eps-clip 0.1", (0.1, 0.1)), ("--eps-clip-high 0.3", (3e-4, 0.3))):
        args = parse(argv(f"--advantage-estimator gspo {words}"))
        assert (args.eps_clip, args.eps_clip_high) == bounds
