"""The commands of the documents and of `--help`: typed as they stand, they are accepted."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

import instep
from instep.arguments.all_flags import find, own_flags
from instep.arguments.help import format_help
from instep.arguments.parse import parse
from instep.arguments.parser import scan
from instep.arguments.suggest import acts_in, named_flags
from instep.preflight.plan.command import COMMANDS, own_options
from instep_neighbours.atropos import env_api, server, trainer_flags
from instep_neighbours.trl.command_line import FLAGS as TRL_FLAGS
from instep_neighbours.trl.command_line import read
from tests.assets import make_checkpoint
from tests.command_line import CONFIG

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
# Documents that name flags which do not act, or those of vLLM and its router as they are there.
OF_OTHERS = (
    "arguments.md",
    "migration.md",
    "engines_flags.md",
    "algorithms.md",
    "engines_topologies.md",
    "faults.md",
    "checkpoints.md",
    "errors.md",
)


def words_for_serve(words: list[str]) -> list[str]:
    """What `instep vllm-serve` makes of its command line."""
    assert scan(serving := read(words).words, "serve").problems == []
    return serving


# Commands with the command line of somebody else's program: what reads it, and its flags.
NEIGHBOURS = {
    "vllm-serve": (words_for_serve, {f"--{name}" for name in TRL_FLAGS}),
    "env-api": (env_api.parser().parse_args, set(env_api.parser()._option_string_actions)),
    "atropos-train": (trainer_flags.read, set(trainer_flags.parser()._option_string_actions)),
    "atropos-serve": (lambda words: server.server_args(*server._split(words)), {*server._OURS, *server.REFUSED}),
}


def commands(text: str) -> list[list[str]]:
    """The words after `instep` of each command line that begins a line of a text."""
    joined = re.sub(r"\\\n[+\s]*", " ", text)
    names = "|".join(("train", "sft", "dpo", "serve", "plan", *NEIGHBOURS))
    begins = rf"^\s*[$+]?\s*(?:\w+=\S+ )*instep ((?:plan )?(?:{names}) (?:--|\.\.\.).*)$"
    words = [shlex.split(re.split(" (?:2?>|&|#)", line)[0]) for line in re.findall(begins, joined, re.MULTILINE)]
    return [[word for word in line if word != "$@"] for line in words if "--flag" not in line]


FOUND = [(path.name, words) for path in DOCUMENTS for words in commands(path.read_text(encoding="utf-8"))]
FOUND += [
    ("help", words)
    for command in ("train", "train-async", "sft", "dpo", "serve")
    for words in commands(format_help(command))
]


def test_there_are_commands_to_try():
    assert len(FOUND) > 12 and {"README.md", "quick_start.md", "help"} <= {name for name, _ in FOUND}


@pytest.mark.parametrize(("name", "line"), FOUND, ids=[f"{name}-{i}" for i, (name, _) in enumerate(FOUND)])
def test_a_command_of_the_documents_is_accepted(name, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *words = line
    whole = "..." not in words
    words = [word for word in words if word != "..."]
    monkeypatch.syspath_prepend(tmp_path)
    for flag, value in zip(words, words[1:], strict=False):
        make(flag, value)
    if command in NEIGHBOURS:
        assert NEIGHBOURS[command][0]([*words, *([] if whole else ["--model-name", "x"])]) is not None
        return
    words = own_options(words)[1] if command == "plan" else words
    named = words.pop(0) if command == "plan" and words[0] in COMMANDS else command
    assert scan(words, named).problems == []
    if not whole or "--vllm-config" in words or "ray" in words or "/shared/runs/one" in words:
        return  # the rest of the command, its file or its cluster is not there
    for value in words[words.index("--eval-prompt-data") + 1 :][1:2] if "--eval-prompt-data" in words else []:
        make("--prompt-data", value)
    words += ["--num-rollout", "1"] if name == "quick_start.md" else []
    command += f" {named}" if named != command else ""
    args = parse(words, command)
    assert args.command == ("train" if command == "plan" else named)
    with pytest.raises(SystemExit):
        parse([*words, "--dump-config", "f.yaml"], command)
    again = parse(["--config", "f.yaml"], command)
    notes = [re.sub(r" \(f.yaml, line \d+\)", "", note) for note in again.notes]
    assert again.replace(config=None, notes=notes) == args


def test_the_python_of_the_readme_is_accepted(tmp_path, monkeypatch):
    """Its rows, its reward and its flags; the model is a folder here."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("google/gemma-3-270m"))
    runs, found = [], {}
    monkeypatch.setattr(instep, "train", lambda **given: runs.append(instep.Run(**given)))
    exec(re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1], found)
    rows = [json.loads(line) for line in next(Path("runs").glob("*/prompts-*.jsonl")).read_text().splitlines()]
    assert len(rows) == 2000 and len(runs) == 1
    for response, right in ((f" {rows[0]['label']}\n", 1), ("1", 0)):
        assert found["reward"](None, SimpleNamespace(response=response, label=rows[0]["label"])) == right


def make(flag: str, value: str) -> None:
    """What a flag names: a model's folder, a data file, a module of hooks."""
    path = Path(value)
    if flag in ("--hf-checkpoint", "--ref-load", "--model", "--model-name"):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(CONFIG))
        (path / "model.safetensors").write_bytes(b"0")
    elif flag == "--prompt-data":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"prompt": "1 + 1", "label": "2"}\n')
    elif flag in own_flags() and own_flags()[flag].type_label == "MODULE.NAME":
        Path(value.partition(".")[0] + ".py").write_text("")


def test_every_flag_that_the_documents_name_acts():
    """Or is read as one that does."""
    for path in DOCUMENTS:
        if path.name in OF_OTHERS:
            continue
        text = re.sub(r"```(?!bash).*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        names = set(named_flags(text)) - {"--split"}  # of `instep samples`
        if path.parent.name == "neighbours":
            theirs = {flag.replace("_", "-") for _, flags in NEIGHBOURS.values() for flag in flags}
            names = {name for name in names if name.replace("_", "-") not in theirs and "." not in name}
        for name in names:
            flag = find(name, sglang=path.name == "engines_sglang.md")
            if flag is None:  # of pip, docker, Ray, Slurm, ...; not a misspelt one
                assert not difflib.get_close_matches(name, own_flags(), cutoff=0.9), (path.name, name)
            else:
                assert flag.read_as or any(acts_in(c, flag) for c in ("train", "train-async", "sft", "dpo", "serve")), (
                    path.name,
                    name,
                    flag.note,
                )
