"""Damage of what a run has written: checkpoints, lines of its logs, its folder; and paths of others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.faults.harness import ENDLESS, Place, Result, steps
from tests.faults.registry import scenario


def damaged(place: Place, name: str, *words: str, damage: Callable[[Path], None]) -> None:
    """A resume from checkpoints whose newest one was damaged ends by `words`, and --ckpt-step 0 goes on."""
    ckpt = Path(shutil.copytree(place.saved, place.folder / "ckpt"))
    damage(ckpt)
    with place.run("--load", str(ckpt), "--save", str(ckpt), "--num-rollout", "4") as run:
        run.error(name, "CheckpointError: ", *words)


def flip(path: Path) -> None:
    """One bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@scenario(slow=True, weight_flipped="error: one bit of a checkpoint's weights has changed")
def weight_flipped(place: Place) -> None:
    def damage(ckpt: Path) -> None:
        flip(max((p for p in (ckpt / "iter_0000001").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size))

    damaged(place, "weight_flipped", "iter_0000001 is damaged", "different content", "--ckpt-step: 0", damage=damage)


@scenario(slow=True, state_flipped="error: one bit of a checkpoint's `run_state.json` has changed")
def state_flipped(place: Place) -> None:
    def damage(ckpt: Path) -> None:
        flip(ckpt / "iter_0000001" / "run_state.json")

    damaged(place, "state_flipped", "run_state.json", "--ckpt-step: 0", damage=damage)


@scenario(slow=True, manifest_missing="error: `files.json` and `run_state.json` of a checkpoint are gone")
def manifest_missing(place: Place) -> None:
    def damage(ckpt: Path) -> None:
        for name in ("files.json", "run_state.json"):
            (ckpt / "iter_0000001" / name).unlink()

    damaged(place, "manifest_missing", "iter_0000001", "files.json", "--ckpt-step: 0", damage=damage)


@scenario(
    slow=True,
    tracker_missing="recovered: `latest_checkpointed_iteration.txt` is gone",
    samples_cut="recovered: a run is started again whose samples.jsonl was cut off inside a character",
)
def tracker_missing(place: Place) -> None:
    ckpt = Path(shutil.copytree(place.saved, place.folder / "ckpt"))
    (ckpt / "latest_checkpointed_iteration.txt").unlink()
    run_dir = Path(shutil.copytree(place.saved.parent / "run", place.folder / "run"))
    samples = run_dir / "samples.jsonl"
    samples.write_bytes(samples.read_bytes() + '{"rollout_id": 1, "response": "\u4e2d'.encode()[:-1])
    flags = ("--load", str(ckpt), "--save", str(ckpt), "--num-rollout", "3")
    with place.run(*flags, run_dir=run_dir) as run:
        code, stderr, seconds = run.end()
    assert code == 0 and [row["step"] for row in steps(run_dir)] == [0, 1, 2], stderr[-3000:]
    place.results["tracker_missing"] = Result(seconds, "a line: the newest complete checkpoint is taken")
    place.results["samples_cut"] = Result(seconds, "nothing: half a line is left out")


@scenario(slow=True, run_dir_deleted="error: the run's folder is deleted under it")
def run_dir_deleted(place: Place) -> None:
    with place.run(*ENDLESS) as run:
        run.wait_steps()
        run.mark()
        shutil.rmtree(run.run_dir)
        run.error("run_dir_deleted", "OutputError: ", str(run.run_dir))


@scenario(slow=True, export_over_files="error: `--save-hf` names a folder with files of the user")
def export_over_files(place: Place) -> None:
    mine = place.folder / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with place.run("--save-hf", str(mine)) as run:
        run.error("export_over_files", "Error: ", str(mine), "--save-hf", code=2)
    assert (mine / "notes.txt").read_text() == "mine"


@scenario(slow=True, save_over_model="error: `--save` names the folder of `--hf-checkpoint`")
def save_over_model(place: Place) -> None:
    model = Path(shutil.copytree(place.tiny / "hf", place.folder / "hf"))
    before = sorted(p.name for p in model.iterdir())
    with place.run("--hf-checkpoint", str(model), "--save", str(model)) as run:
        run.error("save_over_model", "ConfigError: ", "--hf-checkpoint", "--save", code=2)
    assert sorted(p.name for p in model.iterdir()) == before


@scenario(slow=True, bucket_elsewhere="error: a sync's manifest names a file outside the run's folder")
def bucket_elsewhere(place: Place) -> None:
    patch = """
        import shutil
        from instep.engines.engine import Engine
        real = Engine.post
        def post(self, path, body=None, **kwargs):
            manifest = (body or {}).get("update_info", {}).get("manifest")
            if manifest and manifest["version"] == "2":
                manifest["path"] = shutil.copy(manifest["path"], os.environ["FAULT_MARK"] + "-copy")
                mark()
            return real(self, path, body, **kwargs)
        Engine.post = post
        """
    with place.run(*ENDLESS, patches={"controller": patch}) as run:
        run.error("bucket_elsewhere", "SyncError: version 2 did not arrive", "-copy")
