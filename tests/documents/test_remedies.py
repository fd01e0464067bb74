"""Every remedy in the package that names a flag: the flag acts, with the value that is named."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.arguments.all_flags import find, own_flags, passed_through
from instep.arguments.flag import Flag
from instep.arguments.parse import parse
from instep.arguments.parser import scan
from instep.arguments.suggest import acts_in, named_flags
from instep.engines.flags import PREFIXES
from instep.engines.reserved_flags import reserved
from instep.errors import InstepError, NoAnswerError
from tests.command_line import CONFIG, argv, make_folder, refusal

ROOT = Path(__file__).parents[2]
SOURCES = sorted(file for name in ("instep", "instep_neighbours") for file in (ROOT / name).rglob("*.py"))
# Flags of other programs, which remedies name: `pip`, `hf`, `docker`, `ray`, `vllm serve`, `instep samples`.
FOREIGN = {
    "--env.rollout_server_url",  # of Atropos' environments
    "--worst",
    "--local-dir",
    "--shm-size",
    "--num-gpus",
    "--num-cpus",
    "--node-ip-address",
    "--weight-transfer-config",
    *("--sampling-backend", "--pp-size", "--dp-size"),  # of a SGLang that a user starts
    "--logprobs-mode",
    "--enable-return-routed-experts",
    "--api-server-count",
    "--no-deps",
}


def remedies() -> Iterator[tuple[str, str]]:
    """The text of each remedy in the source, with `{}` for what is filled in, and where it stands."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for value in _values(node):
                for text in _texts(value):
                    yield f"{file.relative_to(ROOT)}:{value.lineno}", text
    for flag in own_flags().values():
        yield from ((flag.name, text) for text in flag.megatron_only[1:])


def _values(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and "remedy" in t.id.lower() for t in node.targets):
        return [node.value]
    if not isinstance(node, ast.Call):
        return []
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    found = [k.value for k in node.keywords if k.arg == "remedy"]
    place = {"Problem": 2, "Combination": 3}.get(name)
    return found + (node.args[place : place + 1] if place is not None else [])


def _texts(value: ast.expr) -> Iterator[str]:
    """The alternatives of an expression."""
    if isinstance(value, ast.IfExp):
        yield from _texts(value.body)
        yield from _texts(value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in value.values)
        yield "".join(str(p) for p in parts)
        for part in value.values:
            if isinstance(part, ast.FormattedValue):
                yield from _texts(part.value)


def wrong_values(text: str) -> list[str]:
    """`--flag word` in a text, where the flag has choices and the word, which is none, is no word of the sentence."""
    out = []
    for name, word in re.findall(r"(--[a-z][\w-]*)(?: |=)([a-z_0-9]+(?:-[a-z]+)*)\b", text):
        flag = find(name)
        if (
            flag is not None
            and flag.choices
            and word not in flag.choices
            and word not in "and or with where for on out"
        ):
            out.append(f"{name} {word}")
    return out


def test_every_remedy_of_the_source_names_flags_that_act():
    found = list(remedies())
    naming = [(where, text) for where, text in found if named_flags(text)]
    assert len(found) > 300 and len(naming) > 100
    wrong = []
    for where, text in naming:
        names = [n for n in named_flags(re.sub(r"`[^`]*`", "", text)) if n not in FOREIGN | of_command(where)]
        wrong += [f"{where}: {n} does not act: {text}" for n in names if not _acts(n)]
        wrong += [f"{where}: {pair}: {text}" for pair in wrong_values(text)]
    assert not wrong, "\n".join(wrong)


def of_command(where: str) -> set[str]:
    """The flags of the command that a file is of, where it has flags of its own."""
    return {"--model", "--save-path", "--trainer-rank"} if where.startswith("instep_neighbours/atropos/") else set()


def _acts(name: str) -> bool:
    known = [find(name), find(name, sglang=True)]
    return any(acts_in(command, flag) for command in ("train", "sft", "dpo", "serve") for flag in known)


def flags_that_do_not_act() -> dict[str, Flag]:
    flags = {name: flag for name, flag in {**passed_through(), **own_flags()}.items()}
    flags = {name: flag for name, flag in flags.items() if flag.status in ("later", "refused")}
    for package in ("vllm", "vllm-router"):
        for field, _, _ in reserved(package):
            flag = find(PREFIXES[package] + field.replace("_", "-"))
            if flag is not None and flag.status != "acts":
                flags[flag.name] = flag
    for name in ("--sglang-anything", "--openai.anything", "--env.anything", "--slurm"):
        flags[name] = find(name)
    return flags


def reading(flags: dict[str, Flag]) -> list[tuple[list[str], Flag]]:
    """The words that give each flag: SGLang's with a backend that reads them as vLLM's, and as its own."""
    typed = [([name, *["--rollout-backend=vllm"] * name.startswith("--sglang-")], flag) for name, flag in flags.items()]
    for package in ("sglang", "sglang-router"):
        for field, _, _ in reserved(package):
            name = PREFIXES[package] + field.replace("_", "-")
            if (flag := find(name, sglang=True)) is not None and flag.status != "acts" and "" not in flag.neutral:
                typed.append(([name, "--rollout-backend=sglang"], flag))
    return typed


@pytest.mark.parametrize("command", ["train", "sft", "dpo", "serve"])
def test_what_is_named_instead_of_a_flag_acts_in_the_command(command):
    flags = flags_that_do_not_act()
    assert len(flags) > 550
    for (flag_name, *more), flag in reading(flags):
        (problem,) = scan([flag_name, *more], command).problems
        assert problem.remedy and problem.what.startswith(flag.status), problem
        for name in named_flags(problem.remedy):
            assert acts_in(command, find(name)) or acts_in(command, find(name, sglang=True)), (
                flag_name,
                problem.remedy,
            )
        assert not wrong_values(problem.remedy), problem
        for name in named_flags(problem.remedy):
            choices = (
                find(name) or find(name, sglang=True)
            ).choices  # a value that SGLang's flag takes is good for vLLM's, too
            assert (
                not choices
                or flag_name.startswith("--sglang-")
                or re.search(rf"{name} ({'|'.join(map(str, choices))})", problem.remedy)
            ), problem


def test_every_error_says_where_and_what_to_do():
    """Each raise of a named error, and each problem of a command line, has a place and a remedy that are not empty."""
    errors = {error.__name__ for error in (*InstepError.__subclasses__(), NoAnswerError)}
    count = 0
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            given = {k.arg for k in node.keywords if not (isinstance(k.value, ast.Constant) and not k.value.value)}
            place = f"{file.relative_to(ROOT)}:{node.lineno}"
            if node.func.id in errors:
                missing = {"where", "remedy"} - given  # `Hook.guard` names the place of an error of a rollout
                assert not missing or (missing == {"where"} and node.func.id == "RolloutError"), place
                count += 1
            elif node.func.id == "Problem" and "refused" not in {k.arg for k in node.keywords}:  # notes are no errors
                assert len(node.args) > 2 or "remedy" in given, place
    assert count > 250


def test_no_reason_is_work_that_is_done():
    """A reason is about the flag, not about the order in which instep was made."""
    for name, flag in flags_that_do_not_act().items():
        assert not re.search(r"comes with|\btoday\b|\bwork\b", flag.note), (name, flag.note)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_megatron_refuses_an_unknown_mixture_of_experts_before_anything_loads(key, tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    Path("model/config.json").write_text(json.dumps({**CONFIG, key: 8}))
    text = refusal("--train-backend megatron")
    assert f"{key} 8" in text and "--train-backend hf; or give one of qwen3, qwen2, llama, qwen3_moe" in text
    assert parse(argv("--train-backend hf")).train_backend == "hf"  # which the remedy names
    assert parse(argv("--debug-rollout-only")).debug_rollout_only
    Path("model/config.json").write_text(json.dumps({**CONFIG, key: 1}))
    assert parse(argv("--train-backend megatron")).train_backend == "megatron"
