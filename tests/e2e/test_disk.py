"""What a run finds on the disk and leaves there: rerun, resumed when finished, damaged, deleted under it."""

import json
import shutil
import time

import pytest

from instep.models.sizes import shape_of
from tests.bounds import allowed
from tests.e2e.commands import run, sft_arguments, start
from tests.e2e.test_endings import in_rollout, wait_for


def files(folder):
    """Name -> content of what lies directly in the folder and in `logs`."""
    return {p.name: p.read_bytes() for p in (*folder.glob("*.json*"), *folder.glob("logs/*"))}


@pytest.mark.slow
def test_a_run_again_finished_damaged_and_anew(tiny, tmp_path):
    load = ["--load", str(tmp_path / "ckpt")]
    done = run(sft_arguments(tiny, tmp_path, "--num-rollout", "1", *load))
    assert done.returncode == 0, done.stderr[-3000:]
    first = files(tmp_path)
    checkpoint = tmp_path / "ckpt" / "iter_0000000"
    written = sum(p.stat().st_size for p in checkpoint.glob("*.distcp"))
    num = shape_of(str(tiny / "hf")).total
    assert 12 * num <= written <= 14 * num  # as `check_space` reckons

    again = run(sft_arguments(tiny, tmp_path, "--num-rollout", "1", *load))  # finished: nothing is started
    assert again.returncode == 0, again.stderr[-3000:]
    assert "nothing is left to train, the next rollout would be 1 of --num-rollout 1" in again.stdout
    assert f"{checkpoint} covers all earlier ones" in again.stdout
    now = files(tmp_path)
    for name in ("metrics.jsonl", "samples.jsonl", "actor-rank0.log"):
        assert now[name] == first[name]
    assert json.loads(now["summary.json"])["num_steps"] == json.loads(first["summary.json"])["num_steps"]

    weights = checkpoint / "__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    damaged = run(sft_arguments(tiny, tmp_path, "--num-rollout", "2", *load))
    assert damaged.returncode == 1 and "__0_0.distcp has different content than was written" in damaged.stderr
    assert "start again without --load" in damaged.stderr and "Traceback" not in damaged.stderr
    assert files(tmp_path) == now

    anew = run(sft_arguments(tiny, tmp_path, "--num-rollout", "1"))
    assert anew.returncode == 0, anew.stderr[-3000:]
    assert f"its files are in {tmp_path / 'old-1'} now" in anew.stdout
    assert f"see {tmp_path / 'ckpt' / 'old-1'}" in anew.stdout
    assert files(tmp_path / "old-1") == now
    assert (tmp_path / "ckpt" / "old-1" / "iter_0000000" / "__0_0.distcp").read_bytes() == content
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "0"
    ids = [json.loads((p / "config.json").read_text())["run_id"] for p in (tmp_path, tmp_path / "old-1")]
    states = [json.loads(p.read_text()) for p in tmp_path.glob("ckpt/**/run_state.json")]
    assert len(set(ids)) == 2 and {state["run_id"] for state in states} == set(ids)
    now = files(tmp_path)
    earlier = run(sft_arguments(tiny, tmp_path, "--num-rollout", "2", "--load", str(tmp_path / "ckpt" / "old-1")))
    assert earlier.returncode == 2 and "holds the files of another run than" in earlier.stderr
    assert f"it was {tmp_path / 'old-1'}" in earlier.stderr and files(tmp_path) == now
    assert json.loads((tmp_path / "hf" / "files.json").read_text())["kind"] == "export"
    assert not list(tmp_path.glob("hf.old*")) and not list(tmp_path.glob(".hf*"))


def test_a_run_folder_that_is_deleted_under_a_run_ends_it_with_the_truth(tiny, tmp_path):
    folder = tmp_path / "run"
    process = start(sft_arguments(tiny, folder, "--num-rollout", "100000", "--save-interval", "1"))
    try:
        wait_for(lambda: (folder / "ckpt" / "iter_0000000").exists() and in_rollout(folder)(), 120, process)
        folder.rename(tmp_path / "gone")  # all at once
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        since = time.monotonic()
        _, error = process.communicate(timeout=240)
        assert process.returncode == 1 and time.monotonic() - since < allowed(30)
    finally:
        process.kill()
    assert "Traceback" not in error and "is complete in" not in error and "untouched" not in error, error
    assert "was moved, removed or replaced" in error or "there is no complete checkpoint in" in error, error
