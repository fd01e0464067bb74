"""slime's helpers under slime's names: how its examples import and call them, and what they give."""

import asyncio
import importlib
import inspect
import sys
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.errors import ConfigError
from instep.rollout import runtime
from instep.rollout.execute import train_sampling_params
from instep.rollout.rm_hub import async_rm, batched_async_rm, grade_answer_verl
from instep.rollout.rm_hub.math_dapo_utils import compute_score
from instep.rollout.rm_hub.math_utils import _grader, extract_answer
from instep.rollout.sglang_rollout import GenerateState
from instep.system.hooks import load_function
from instep.system.hooks.aliases import is_installed
from instep.types import Sample
from instep_neighbours.slime import SLIME as MODULES
from tests.assets import make_checkpoint
from tests.command_line import argv, make_folder

OF_VIME = "vime.rollout.vllm_rollout"
HOOK = """
def reward(args, sample):
    return float(isinstance(sample, types.Sample) and sample.response == "7")
"""
RENAMED = [name for name in MODULES if name.startswith(("slime.rollout.sglang_rollout", "slime.rollout.rm_hub"))]


@pytest.fixture
def view(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    make_checkpoint(tmp_path / "hf")
    yield lambda words: parse(argv(f"--hf-checkpoint {tmp_path}/hf {words}", "--hf-checkpoint --rm-type")).view({})
    runtime.shutdown()


@pytest.mark.parametrize("theirs", RENAMED)
def test_modules_in_which_only_the_package_has_another_name(theirs):
    module = importlib.import_module(theirs.replace("slime.", "instep.", 1))
    for name in MODULES[theirs][1].split():
        assert getattr(module, name) is load_function(f"{MODULES[theirs][0]}.{name}")


@pytest.mark.parametrize(
    "function, parameters, is_async",
    [
        (GenerateState, "args", False),
        (async_rm, "args sample", True),
        (batched_async_rm, "args samples", True),
        (grade_answer_verl, "solution_str ground_truth", False),
        (extract_answer, "passage", False),
        (compute_score, "solution_str ground_truth strict_box_verify", False),
    ],
)
def test_they_are_called_as_in_slime(function, parameters, is_async):
    assert list(inspect.signature(function).parameters) == parameters.split()
    assert inspect.iscoroutinefunction(function) == is_async


def test_the_state_of_a_generate_function(view):
    args = view("--rm-type math --rollout-temperature 0.7 --rollout-max-response-len 9 --rollout-stop a b")
    state = GenerateState(args)
    ids = state.tokenizer("1 + 1", add_special_tokens=False)["input_ids"]
    assert ids and state.tokenizer.decode(ids) == "1 + 1" and state.tokenizer is GenerateState(args).tokenizer
    assert state.sampling_params == train_sampling_params(args)
    expected = {"temperature": 0.7, "max_new_tokens": 9, "stop": ["a", "b"]}
    assert expected.items() <= state.sampling_params.items()


@pytest.mark.parametrize(
    "response, label, score, pred",
    [
        (r"\boxed{34}", "34", 1.0, "34"),
        (r"\boxed{12} \boxed{34}", "34", 1.0, "34"),
        (r"\boxed{034}", "34", -1.0, "034"),  # word for word
        (r"\boxed{34}" + "." * 90, "34", 1.0, "34"),
        (r"\boxed{34}" + "." * 91, "34", -1.0, None),  # not in the last 100 characters
        ("Answer: 34", "34", -1.0, None),
        (r"\boxed{None}", None, 1.0, "None"),
    ],
)
def test_the_score_of_a_strict_box(response, label, score, pred):
    assert compute_score(response, label, strict_box_verify=True) == {"score": score, "acc": score > 0, "pred": pred}


def test_the_score_of_an_answer_line():
    assert compute_score("Answer: 34", "34") == {"score": 1.0, "acc": True, "pred": "34"}
    assert compute_score(r"\boxed{34}", "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


GRADED = [
    (r"\boxed{\frac{1}{2}}", "0.5", True),
    (r"\boxed{1} \boxed{2}", r"\boxed{2}", True),
    (r"\boxed{2}", 2, True),
    (r"\boxed{0}", 0, True),
    (r"\boxed{3}", "2", False),
    ("2", "2", False),
    (r"\boxed{2}", "", False),
    (r"\boxed{2}", None, False),
]


@pytest.mark.parametrize("response, label, right", GRADED)
def test_the_grade_of_a_boxed_answer(response, label, right):
    before = _grader.cache_info()
    assert grade_answer_verl(response, label) is right and _grader.cache_info() == before, "none needs algebra"
    assert extract_answer(response) == (None if "boxed" not in response else response.split("boxed{")[-1][:-1])


def test_algebra_in_a_hook_that_is_async_and_in_none():
    """The rollout's own loop waits for it, though the worker has another loop."""
    pytest.importorskip("math_verify")

    async def hook() -> list[bool]:
        return [grade_answer_verl(r"\boxed{x^2 + 2x + 1}", label) for label in ("(x+1)^2", "(x-1)^2")]

    try:
        assert runtime.run(hook(), timeout=100) == [True, False]
    finally:
        runtime.shutdown()
    assert asyncio.run(hook()) == [True, False]
    assert grade_answer_verl(rf"\boxed{{{'x' * 2000}}}", "y + 1") is False  # too long for algebra


asked: list[Any] = []


async def my_reward(args, target):
    asked.append(target)
    return float(len(target.response)) if isinstance(target, Sample) else [float(len(s.response)) for s in target]


def test_rewards_of_samples(view):
    samples = [Sample(group_index=0, index=i, response=rf"\boxed{{{i}}}", label="1") for i in range(2)]
    rule = view("--rm-type math")
    assert runtime.run(async_rm(rule, samples[1]), timeout=60) == 1.0
    assert runtime.run(batched_async_rm(rule, samples), timeout=60) == [0.0, 1.0]
    assert runtime.run(batched_async_rm(rule, []), timeout=60) == []
    mine = view(f"--custom-rm-path {__name__}.my_reward")
    assert runtime.run(async_rm(mine, samples[0]), timeout=60) == 9.0 and asked.pop() is samples[0]
    assert runtime.run(batched_async_rm(mine, samples), timeout=60) == [9.0, 9.0]
    assert asked == [samples], "one call for all"


@pytest.fixture
def forgotten(tmp_path, monkeypatch):
    """A folder on Python's path; modules of slime and vime that a test has imported are forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("slime", "vime", "written_for")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.mark.parametrize("package", ["slime", "vime"])
def test_a_file_that_was_written_for_slime_is_a_hook_as_it_is(forgotten, package):
    modules = {name.replace("slime.", f"{package}.", 1): found for name, found in MODULES.items() if name != OF_VIME}
    lines = [f"from {name} import {', '.join(names.split())}" for name, (_, names) in modules.items()]
    (forgotten / "written_for.py").write_text("\n".join([*lines, f"import {package}.utils.types as types", HOOK]))
    load_function.cache_clear()
    assert load_function("written_for.reward")(None, Sample(response="7")) == 1.0
    for theirs, (ours, names) in modules.items():
        for name in names.split():
            assert getattr(sys.modules[theirs], name) is load_function(f"{ours}.{name}")
    (forgotten / "written_for.py").write_text(f"import {package}.agent.harness\n")
    del sys.modules["written_for"]
    load_function.cache_clear()
    with pytest.raises(ConfigError, match=f"imports '{package}.agent', which is not installed") as error:
        load_function("written_for.reward")
    assert "docs/migration.md" in error.value.remedy


def test_an_installed_slime_is_imported_itself(forgotten):
    load_function("instep.types.Sample")  # which lets the others be found
    (forgotten / "slime").mkdir()
    (forgotten / "slime/__init__.py").write_text("")
    assert is_installed("slime") and not is_installed("vime")
    with pytest.raises(ModuleNotFoundError, match="slime.utils"):
        importlib.import_module("slime.utils.types")
