"""A run on several data files with weights, one of which stays on disk, goes on where it was; not on other rows."""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from tests.e2e.commands import run
from tests.e2e.test_resume import kill_and_compare

BUILDING = "building the index"


@pytest.mark.slow
def test_a_killed_run_on_files_with_weights_is_bit_identical(tiny, tmp_path):
    def write(shift):
        rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()]
        for i, row in enumerate(rows[:20]):
            row["metadata"] = {"ballast": letters[i * 1000 :], "number": i + shift}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:20]), large, compression="none")
        assert large.stat().st_size > 16 << 20

    large, cache, letters = tmp_path / "large.parquet", tmp_path / "cache", os.urandom(500_000).hex()
    write(0)
    files = ["--prompt-data", f"{tiny / 'train.jsonl'}@[-30:],{large}", "--prompt-data-weights", "3", "1"]
    files += ["--rollout-shuffle", "--rollout-max-prompt-len", "100", "--data-cache-path", str(cache)]
    victim = kill_and_compare(tiny, tmp_path, "hf", 2, *files)
    assert len(list(cache.iterdir())) == 1 and BUILDING not in victim.sessions[-1].stderr
    write(1)
    done = run(victim.arguments)
    assert done.returncode != 0 and f"where:  {large}" in done.stderr and BUILDING in done.stderr
    assert "the 20 usable prompts differ from those when the state was saved" in done.stderr
