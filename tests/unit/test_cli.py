"""The entry points: exit codes, texts, signals."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import instep
from instep.cli import OWN, main, overview
from instep.system.hooks.neighbours import commands
from tests.assets import make_checkpoint, make_prompts
from tests.bounds import allowed

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"instep {instep.__version__}\n"
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        assert "instep COMMAND" in capsys.readouterr().out
    for command in ("train", "sft"):
        assert main([command, "--lr", "--help"]) == 0
        assert f"usage: instep {command}" in capsys.readouterr().out


def test_a_wrong_command_line_ends_with_2_and_a_text(capsys):
    assert main(["train", "--lr", "fast"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ") and "'fast' is not a number" in error and "Traceback" not in error
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert "unknown command 'trian'" in error and "did you mean `instep train`?" in error
    assert main(["--lr", "1"]) == 2
    assert "the commands are train, train-async, sft" in capsys.readouterr().err


def test_help_names_every_command_and_each_has_help(capsys):
    assert set(re.findall(r"^  ([a-z-]+) ", overview(), re.M)) == set(commands(OWN))
    for command in commands(OWN):
        with contextlib.suppress(SystemExit):  # argparse's
            assert main([command, "--help"]) == 0
        assert f"usage: instep {command}" in capsys.readouterr().out


def test_report_wants_a_folder(tmp_path, capsys):
    assert main(["report"]) == 2
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert main(["report", str(tmp_path)]) == 2 and not (tmp_path / "report.html").exists()  # not of a run
    assert "not the folder of a run" in capsys.readouterr().err


@pytest.mark.alone
def test_help_in_half_a_second_without_torch():
    """Seconds of one core, which are those of the clock where nothing else runs."""
    code = (
        "import sys, time; from instep.cli import main; code = main(['train', '--help'])\n"
        "assert not {'torch', 'transformers', 'numpy', 'aiohttp'} & set(sys.modules)\n"
        "print(time.process_time(), file=sys.stderr); sys.exit(code)"
    )
    seconds = []
    for _ in range(3):  # the best of three: other work may share the caches of the machine
        done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stderr))
    assert min(seconds) < allowed(0.5), seconds


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU it is used")
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [([], 1), (["--tensor-model-parallel-size", "2"], 2), (["--micro-batch-size", "64"], 1), (["--device=auto"], 1)],
)
def test_one_copy_of_the_model_by_default_where_auto_means_the_cpu(flags, ranks, tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "hf")
    make_prompts(tmp_path / "train.jsonl", 8)
    found = []
    monkeypatch.setattr("instep.train_sync.train", found.append)
    words = (
        f"train --hf-checkpoint {tmp_path}/hf --prompt-data {tmp_path}/train.jsonl --input-key prompt --rm-type math"
    )
    code = main([*words.split(), "--label-key", "label", "--rollout-batch-size", "8", "--num-rollout", "1", *flags])
    assert code == 0 and [(args.device, args.world_size, args.dp_size) for args in found] == [("cpu", ranks, 1)]


@pytest.mark.parametrize("start", [["-m", "instep.cli", "train"], [str(ROOT / "train.py")]])
def test_other_ways_to_start(start, tmp_path):
    done = subprocess.run(
        [sys.executable, *start, "--release-train"], env=ENV, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "--release-train" in done.stderr and "live as long as the run" in done.stderr


def test_train_async_is_a_command_of_its_own():
    words = [sys.executable, str(ROOT / "train_async.py"), "--offload-train"]
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "instep train-async" in done.stderr
    assert "trainer and engines work at the same time" in done.stderr


def test_hooks_may_be_modules_of_the_current_folder(tmp_path):
    (tmp_path / "my_reward.py").write_text("raise SystemExit('imported too early')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.remove(''); from instep.cli import main; sys.exit(main())"]
        + ["train", "--custom-rm-path", "my_reward.f", "--eval-function-path", "other_module.f"],
        env=ENV,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "'other_module'" in done.stderr and "my_reward" not in done.stderr
