"""Models and data sets by name, from a local hub and from a cache laid out as the hub's own library does."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.data.named import file_of, is_named
from instep.data.rows import split_files
from instep.engines.spec import EngineSpec
from instep.errors import ConfigError
from instep.models import hub
from instep.system.private import private_files
from instep_neighbours.trl.command_line import read
from tests.hub import Hub

CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SMALL = ["chat_template.jinja", "config.json", "model.safetensors.index.json", "tokenizer.json"]


def make_model(folder: Path, **config: object) -> Path:
    """A folder as a repository has it: the files of a checkpoint in two shards, and others that nobody needs."""
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    texts = {"config.json": {**CONFIG, **config}, "model.safetensors.index.json": index, "tokenizer.json": {}}
    folder.mkdir(parents=True)
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value))
    for name in ["chat_template.jinja", *SHARDS, "pytorch_model.bin", "original.safetensors", "README.md", "a.gguf"]:
        (folder / name).write_text(f"{name} of {folder}")
    return folder


def in_child(function: Callable[[Path], None], root: Path) -> str:
    """The error, if any, of a function of this file in a process without the user's variables for the hub, which act
    at an import."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    code = f"import pathlib, tests.unit.test_hub as t; t.{function.__name__}(pathlib.Path({str(root)!r}))"
    home = {"HF_HOME": str(root / "home"), "XDG_CACHE_HOME": str(root / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**others, **home}, capture_output=True, text=True, timeout=240
    )
    return done.stdout + done.stderr if done.returncode else ""


def started_hub() -> Hub:
    """A hub that this process asks from now on."""
    assert "huggingface_hub" not in sys.modules
    started = Hub()
    os.environ["HF_ENDPOINT"] = started.url
    return started


def refused(call: Callable[[], object], *said: str) -> None:
    try:
        answer = call()
    except ConfigError as error:
        assert all(text in str(error) for text in said), error
    else:
        raise AssertionError(answer)


def arguments(*more: str) -> Args:
    words = "--prompt-data p.jsonl --rm-type random --rollout-batch-size 4 --num-rollout 1 --device cpu"
    return parse([*words.split(), "--train-backend", "hf", *more], "train")


def save(args: Args) -> None:
    """A checkpoint in the folder `run`, as far as one says what its run's arguments were."""
    folder = Path("run/iter_0000000")
    folder.mkdir(parents=True)
    state = {"rollout_id": 0, "num_steps": 1, "version": 1, "ledger": {}, "evaluations": [], "args": args.to_dict()}
    (folder / "run_state.json").write_text(json.dumps(state))
    Path("run/latest_checkpointed_iteration.txt").write_text("0")


# ---- with a hub ------------------------------------------------------------------------------------------------------


def test_a_model_by_name(tmp_path):
    assert in_child(online, tmp_path) == ""


def online(root: Path) -> None:
    os.chdir(root)
    Path("p.jsonl").write_text('{"input": "x"}\n')
    here = started_hub()
    repo = here.repo("models/org/tiny")
    first, other = repo.add(make_model(root / "first"), "v1"), repo.add(make_model(root / "second"))

    # Nothing large is fetched for a command line that is wrong, and for a plan.
    refused(lambda: arguments("--hf-checkpoint", "org/tiny", "--lr", "x"), "--lr")
    parse(["--hf-checkpoint", "org/tiny", "--device", "cpu"], "plan")
    assert here.fetched() == SMALL
    with private_files():
        args = arguments("--hf-checkpoint", "org/tiny", "--ref-load", "org/tiny@v1")
    assert hub.name_of(args.hf_checkpoint) == ("org/tiny", other)
    assert hub.name_of(args.ref_load) == ("org/tiny", first)
    assert here.fetched() == sorted(["chat_template.jinja", *SHARDS, *SHARDS])  # the others are the same in both
    assert Path(args.hf_checkpoint, SHARDS[0]).read_text() == f"{SHARDS[0]} of {root / 'second'}"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(Path(args.hf_checkpoint, SHARDS[0]).stat().st_mode) == 0o666 & ~mask

    # A name means one commit in a process; one that goes on has that of its checkpoint, unless the user says another.
    third = repo.add(make_model(root / "third"))
    assert arguments("--hf-checkpoint", "org/tiny").hf_checkpoint == args.hf_checkpoint
    hub.snapshot.cache_clear()
    save(args)
    both = "--load", "run", "--save", "run"
    assert arguments("--hf-checkpoint", "org/tiny", *both).hf_checkpoint == args.hf_checkpoint
    moved = arguments("--hf-checkpoint", "org/tiny@main", *both).hf_checkpoint
    assert hub.name_of(moved) == ("org/tiny", third)
    assert arguments("--hf-checkpoint", "org/tiny", "--load", "run", "--finetune").hf_checkpoint == moved
    here.fetched()

    # Folders are never asked for, and one that is there wins.
    make_model(root / "org/here")
    assert hub.folder_of("org/here", "--hf-checkpoint") == "org/here"
    for path in ("./org/none", "/org/none", "~/none", "a/b/c", "none", "org/none/"):
        refused(lambda path=path: arguments("--hf-checkpoint", path), "no folder", "ORG/NAME")
    assert not here.asked

    here.repo("models/org/secret").add(root / "first")
    here.repo("models/org/secret").token = "mine"
    here.repo("models/org/gated").add(root / "first")
    here.repo("models/org/gated").gated = True
    (root / "pickles").mkdir()
    (root / "pickles/config.json").write_text(json.dumps(CONFIG))
    (root / "pickles/pytorch_model.bin").write_text("x")
    here.repo("models/org/pickles").add(root / "pickles")
    refused(lambda: arguments("--hf-checkpoint", "org/none"), "no folder org/none", f"no such model at {here.url}")
    refused(lambda: arguments("--hf-checkpoint", "org/tiny@v9"), "no revision v9", "--hf-checkpoint org/tiny@v9")
    refused(lambda: arguments("--hf-checkpoint", "org/secret"), "no such model", "HF_TOKEN")
    refused(lambda: arguments("--hf-checkpoint", "org/gated"), "org/gated is gated", "ask for access")
    refused(lambda: arguments("--hf-checkpoint", "org/pickles"), "no model.safetensors", "safetensors")
    assert here.fetched() == ["config.json"]
    os.environ["HF_TOKEN"] = "mine"
    assert hub.name_of(arguments("--hf-checkpoint", "org/secret").hf_checkpoint) == ("org/secret", first)

    from instep_neighbours.atropos.trainer import check_readable

    check_readable("org/tiny")
    refused(lambda: check_readable("org/none"), "instep atropos-train --model-name org/none", "no such model")

    hub.HUB_SECONDS = 0.2
    here.silent.set()
    hub.snapshot.cache_clear()
    assert arguments("--hf-checkpoint", "org/tiny").hf_checkpoint == moved
    refused(lambda: arguments("--hf-checkpoint", "org/none"), "not all of that model", "does not answer")
    here.silent.clear()


# ---- with a cache ----------------------------------------------------------------------------------------------------


def test_a_read_only_cache_without_a_network(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"input": "x"}\n')
    commit, cache = "0123456789" * 4, tmp_path / "hub"
    cached, part = cache / "models--org--cached", cache / "models--org--part"
    snapshot = cached / "snapshots" / commit
    for folder in (cached / "refs", cached / "blobs", snapshot, part / "snapshots" / commit):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(make_model(tmp_path / "model").iterdir())):
        file.rename(cached / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (cached / "refs/main").write_text(commit)
    (part / "snapshots" / commit / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    there = [cache, *cache.rglob("*")]
    folders = [path for path in there if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        refused(lambda: arguments("--hf-checkpoint", str(part / "snapshots" / commit)), "has no weights")
        hub.snapshot.cache_clear()
        for name in ("org/cached", f"org/cached@{commit}"):
            assert arguments("--hf-checkpoint", name).hf_checkpoint == str(snapshot)
        new = "--load run/new --save run/new --critic-load run/critic --critic-save run/critic".split()
        assert arguments("--hf-checkpoint", "org/cached", "--advantage-estimator", "ppo", *new).load == "run/new"
        wanted = "HF_HUB_OFFLINE is set", "`hf download", str(cache)
        refused(lambda: arguments("--hf-checkpoint", "org/none"), "no folder org/none", *wanted)
        refused(lambda: arguments("--hf-checkpoint", f"org/part@{commit}"), "not all of that model", *wanted)
        planned = parse(["--hf-checkpoint", "org/none", "--device", "cpu"], "plan")
        assert planned.hf_checkpoint == "org/none" and "HF_HUB_OFFLINE" in planned.notes[0]
        assert [cache, *cache.rglob("*")] == there
    finally:
        for folder in folders:
            folder.chmod(0o755)


# ---- what names are, and what they are for others --------------------------------------------------------------------


def test_engines_serve_a_model_of_the_hub_by_its_name_too(tmp_path):
    folder = "/c/models--org--tiny/snapshots/abc"
    spec = EngineSpec(0, "policy", folder, "regular", (), None)
    assert spec.names == [folder, "org/tiny"] and spec.on(tmp_path).names == [folder, "org/tiny"]
    assert EngineSpec(0, "policy", "/c/tiny", "regular", (), None).on(tmp_path).names == ["/c/tiny"]
    assert hub.name_of("models--a--b") is None and hub.name_of("snapshots/abc") is None


def test_trls_revision_belongs_to_the_name():
    assert read("org/tiny --revision v1".split()).words == ["--hf-checkpoint", "org/tiny@v1"]
    assert read("--model org/tiny --revision None".split()).words == ["--hf-checkpoint", "org/tiny"]


# ---- data sets -------------------------------------------------------------------------------------------------------


def test_names_of_data_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = "b.jsonl, org/a:main:train@[0:5],org/b@v1:test[:10%],c.json,org/c:train , d.parquet"
    files = ["b.jsonl", "org/a:main:train@[0:5]", "org/b@v1:test[:10%]", "c.json", "org/c:train", "d.parquet"]
    assert split_files(given) == files
    assert [is_named(file) for file in files] == [False, True, True, False, True, False]
    assert [is_named(name) for name in ("org/a", "a.jsonl", "org/a.parquet", "/org/a", "a/b/c", "a")] == [
        True,
        *[False] * 5,
    ]
    kept = tmp_path / "org--a:main:train-0123456789abcdef.parquet"
    kept.write_text("")
    assert file_of("org/a:main:train@[0:5]", "--prompt-data", None, [str(kept)]) == f"{kept}@[0:5]"
    assert file_of("c.json", "--prompt-data", None) == "c.json"


def test_a_data_set_by_name_needs_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"no file org/a:train here, .* needs the package datasets"):
        file_of("org/a:train", "--prompt-data", str(tmp_path))


def test_a_data_set_by_name(tmp_path):
    pytest.importorskip("datasets")
    assert in_child(with_data, tmp_path) == ""


def with_data(root: Path) -> None:
    os.chdir(root)
    here = started_hub()
    make_model(root / "first")
    here.repo("models/org/tiny").add(root / "first")
    configs = "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: train.jsonl}\n"
    for version, rows in (("one", 3), ("two", 4)):
        Path(version).mkdir()
        Path(version, "README.md").write_text(f"{configs}  - {{split: test, path: test.jsonl}}\n---\n")
        Path(version, "train.jsonl").write_text("".join(f'{{"input": "{version} {i}"}}\n' for i in range(rows)))
        Path(version, "test.jsonl").write_text(f'{{"input": "{version}"}}\n')
    repo = here.repo("datasets/org/sums")
    repo.add(root / "one")
    model = "--hf-checkpoint", "org/tiny", "--eval-prompt-data", "sums", "org/sums:main:test", "--eval-interval", "1"
    args = arguments(*model, "--prompt-data", "org/sums:main:train@[1:3]", "--save", "run", "--load", "run")
    assert rows_of(args.prompt_data) == ["one 1", "one 2"]
    assert [rows_of(dataset.path) for dataset in args.eval_datasets] == [["one"]]

    from instep.data import named

    named._fetched.cache_clear()
    repo.add(root / "two")
    save(args)
    again = arguments(*model, "--prompt-data", "org/sums:main:train@[1:3]", "--save", "run", "--load", "run")
    assert again.prompt_data == args.prompt_data and again.eval_datasets == args.eval_datasets
    assert rows_of(arguments(*model, "--prompt-data", "org/sums:train").prompt_data) == [f"two {i}" for i in range(4)]
    for name, said in {
        "org/none:train": "no such data set",
        "org/sums:main:nothing": "nothing",
        "org/sums:other:train": "other",
    }.items():
        refused(lambda name=name: arguments(*model, "--prompt-data", name), f"no file {name} here", said)


def rows_of(path: str) -> list[object]:
    from instep.data.dataset import load_dataset

    return [record.prompt for record in load_dataset(path)]
