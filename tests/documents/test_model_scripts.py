"""scripts/models/*.sh agree with the published config.json of each model, and scripts/run-*.sh fit their GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from instep.arguments.parse import parse
from instep.errors import ConfigError
from instep.models.sizes import shape_in
from tests.command_line import argv, make_folder
from tests.published import PUBLISHED, config

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


def words(name: str) -> list[str]:
    script = f'source "{SCRIPTS}/models/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.split()


def test_every_script_has_its_model():
    assert {path.stem for path in (SCRIPTS / "models").glob("*.sh")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_flags_of_a_model_are_those_of_its_config(name, folder):
    (folder / "model" / "config.json").write_text(json.dumps(config(name)))
    flags = argv("--train-backend megatron --device cpu", without="--train-backend --device")
    args = parse([*flags, *words(name)])
    assert args.num_layers == PUBLISHED[name][0] and not [note for note in args.notes if "not compared" in note]
    for backend in ("megatron", "hf"):
        with pytest.raises(ConfigError, match=r"(?s)(--hidden-size.*config.json|config.json.*--hidden-size)"):
            parse([*flags, *words(name), "--hidden-size", "77", "--train-backend", backend])
    assert shape_in(config(name)).total / 1e9 == pytest.approx(PUBLISHED[name][-1], rel=2e-3)


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("run-*.sh")), ids=lambda path: path.stem)
def test_a_run_fits_its_gpus(path, folder):
    name = path.stem.removeprefix("run-")
    (folder / "model" / "config.json").write_text(json.dumps(config(name)))
    (folder / "data.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')

    def run(command: str, *more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HF_CHECKPOINT": "model", "PROMPT_DATA": "data.jsonl", "INSTEP": command}
        words = ["bash", str(path), "--device", "cuda", *more]
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)

    args = parse(run("echo").stdout.split())
    assert args.num_layers == PUBLISHED[name][0] and args.run_dir == f"runs/{name}"
    done = run(f"{sys.executable} -m instep.cli plan", "--gpu-memory-gb", "80")
    assert done.returncode == 0 and "KV cache" in done.stdout, done.stdout + done.stderr
