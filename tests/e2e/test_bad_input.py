"""Bad input on the command line: one clear error that names the file, line, flag or field and the remedy, at once.

All but the last two tests end before a process starts.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from instep.cli import main
from tests.bounds import allowed
from tests.e2e.commands import ENVIRONMENT, grpo_arguments, run

LONG = json.dumps({"prompt": [{"role": "user", "content": "1" * 300}], "label": "1"})


def write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n")


def with_line(lines: list[str], number: int, row: object) -> list[str]:
    """`lines` with another row at line `number`, counted from 1."""
    text = row if isinstance(row, str) else json.dumps(row)
    return [*lines[: number - 1], text, *lines[number:]]


@pytest.fixture(scope="module")
def bad(tiny, tmp_path_factory) -> Path:
    """A folder of bad data files, checkpoints and hooks; `good/` is the tiny one."""
    root = tmp_path_factory.mktemp("bad")
    make_data(root, tiny)
    make_checkpoints(root, tiny)
    (root / "raises_hook.py").write_text("raise ZeroDivisionError('at import')\n")
    (root / "needy_hook.py").write_text("import a_package_that_is_not_there\n")
    (root / "good_hook.py").write_text("async def reward(args, sample):\n    return 1.0\n")
    (root / "roles.yaml").write_text('{"megatron": [{"role": "critic", "overrides": {"lrr": 1}}]}')
    for name, number in (("tracker", "abc"), ("iteration", "7"), ("state", "7")):
        (root / name).mkdir()
        (root / name / "latest_checkpointed_iteration.txt").write_text(number)
    (root / "state" / "iter_0000007").mkdir()
    (root / "state" / "iter_0000007" / "run_state.json").write_text("{")
    for name, row in (("label", "label"), ("answer", "answer")):
        data = {"name": "e", "path": str(root / "no_label.jsonl" if name == "label" else tiny / "eval.jsonl")}
        (root / f"eval_{name}.yaml").write_text(json.dumps({"eval": {"datasets": [{**data, "label_key": row}]}}))
    return root


def make_data(root: Path, tiny: Path) -> None:
    good, talks = ((tiny / name).read_text().splitlines() for name in ("train.jsonl", "sft.jsonl"))
    write(root / "bad_json.jsonl", with_line(good, 3, '{"prompt": oops}'))
    write(root / "no_prompt.jsonl", with_line(good, 4, {"question": "1+1", "label": "2"}))
    write(root / "no_label.jsonl", with_line(good, 5, {"prompt": "1+1=?"}))
    write(root / "no_role.jsonl", with_line(good, 2, {"prompt": [{"content": "1+1"}], "label": "2"}))
    write(root / "no_content.jsonl", with_line(good, 2, {"prompt": [{"role": "user"}], "label": "2"}))
    write(root / "no_message.jsonl", with_line(good, 2, {"prompt": ["1+1"], "label": "2"}))
    write(root / "a_list.jsonl", with_line(good, 6, [1, 2]))
    write(root / "mixed.jsonl", with_line(with_line(good, 3, "{"), 5, LONG))
    write(root / "one_sided.jsonl", with_line(talks, 3, {"messages": [{"role": "user", "content": "1+1"}]}))
    write(root / "text.jsonl", with_line(talks, 3, {"messages": "hello"}))
    masked = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1", "step_loss_mask": 0}]
    write(root / "masked.jsonl", with_line(talks, 3, {"messages": masked}))
    (root / "empty.jsonl").write_text("")
    (root / "blank.jsonl").write_text("\n\n")
    (root / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    (root / "text.parquet").write_text("not parquet")
    (root / "table.csv").write_text("a,b\n")


def make_checkpoints(root: Path, tiny: Path) -> None:
    for name in ("damaged", "cut", "weightless", "tokenizerless", "templateless", "bert", "t5", "broken_config"):
        shutil.copytree(tiny / "hf", root / name)
    (root / "no_checkpoint").mkdir()
    (root / "damaged" / "model.safetensors").write_bytes(b"\x00garbage" * 100)
    weights = root / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    (root / "weightless" / "model.safetensors").unlink()
    for file in (root / "tokenizerless").glob("tok*"):
        file.unlink()
    for file in (root / "templateless").glob("chat_template*"):
        file.unlink()
    settings = root / "templateless" / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}))
    (root / "broken_config" / "config.json").write_text("{oops")
    from transformers import BertConfig, T5Config

    for name, config in (("bert", BertConfig(architectures=["BertModel"])), ("t5", T5Config())):
        (root / name / "config.json").write_text(config.to_json_string(use_diff=False))


# What is given, where {bad} and {tiny} stand for folders, and the words of its error: what, where, remedy.
DATA = {
    "--prompt-data {bad}/nowhere.jsonl": "no file|{bad}/nowhere.jsonl|--prompt-data",
    "--prompt-data {bad}": "is a folder|--prompt-data",
    "--prompt-data {bad}/table.csv": "neither .jsonl nor .parquet|convert",
    "--prompt-data {bad}/empty.jsonl": "empty|one JSON object per line",
    "--prompt-data {bad}/blank.jsonl": "no rows|{bad}/blank.jsonl",
    "--prompt-data {bad}/binary.jsonl": "UTF-8|binary.jsonl, line 1|convert",
    "--prompt-data {bad}/text.parquet": "not a parquet file|{bad}/text.parquet",
    "--prompt-data {tiny}/train.jsonl@[100:200]": "no row|train.jsonl@[100:200]",
    "--prompt-data {tiny}/train.jsonl@[x:3]": "cannot read the slice|path@[start:stop]",
    "--prompt-data {bad}/bad_json.jsonl": "not JSON|column 12|bad_json.jsonl, line 3|--skip-bad-rows",
    "--prompt-data {bad}/a_list.jsonl": "must be a JSON object, not list|a_list.jsonl, line 6|--skip-bad-rows",
    "--prompt-data {bad}/no_prompt.jsonl": "no 'prompt'|no_prompt.jsonl, line 4|--input-key|label, question",
    "--prompt-data {bad}/no_label.jsonl": "no 'label'|no_label.jsonl, line 5|--label-key|has prompt",
    "--prompt-data {bad}/no_role.jsonl": "message 0 has no role|no_role.jsonl, line 2|fix the row",
    "--prompt-data {bad}/no_content.jsonl": "message 0 (user) has no content|no_content.jsonl, line 2|fix the row",
    "--prompt-data {bad}/no_message.jsonl": "message 0 must be an object|no_message.jsonl, line 2|fix the row",
    "--input-key question": "no 'question'|train.jsonl, line 1|--input-key|label, metadata, prompt",
    "--eval-interval 1 --eval-prompt-data e {bad}/nowhere.jsonl": "no file|--eval-prompt-data, data set e",
    "--eval-interval 1 --eval-prompt-data e {bad}/no_label.jsonl": "no 'label'|data set e|line 5|--eval-label-key",
    "--eval-interval 1 --eval-config {bad}/eval_label.yaml": "no 'label'|--eval-config, data set e|line 5|label_key",
    "--eval-interval 1 --eval-config {bad}/eval_answer.yaml": "no 'answer'|eval.jsonl, line 1|with label_key",
}
CHECKPOINTS = {
    "--hf-checkpoint {bad}/nowhere": "no folder|--hf-checkpoint|ORG/NAME",
    "--hf-checkpoint Qwen/Qwen3-0.6B": "no folder Qwen/Qwen3-0.6B|hf download",
    "--hf-checkpoint {bad}/no_checkpoint": "no config.json|--hf-checkpoint",
    "--hf-checkpoint {bad}/broken_config": "broken_config/config.json cannot be read|copy",
    "--hf-checkpoint {bad}/weightless": "no weights|*.safetensors",
    "--hf-checkpoint {bad}/damaged": "damaged|damaged/model.safetensors|again",
    "--hf-checkpoint {bad}/cut": "damaged|cut/model.safetensors|again",
    "--hf-checkpoint {bad}/tokenizerless": "no tokenizer|{bad}/tokenizerless|tokenizer.json",
    "--hf-checkpoint {bad}/templateless": "--apply-chat-template|{bad}/templateless|chat template",
    "--hf-checkpoint {bad}/bert": "not a causal language model|BertModel",
    "--hf-checkpoint {bad}/t5": "encoder-decoder|causal",
    "--advantage-estimator ppo --critic-load {bad}/nowhere": "no folder|--critic-load",
    "--advantage-estimator ppo --critic-load {bad}/no_checkpoint": "is not a Hugging Face|--critic-load|config.json",
    "--ref-load {bad}/no_checkpoint --use-kl-loss": "is not a Hugging Face|--ref-load|config.json",
    "--save-hf {bad}/bert": "more than an export of instep (|config.json|--save-hf|another folder",
    "--run-dir {bad}/bert": "holds config.json, and is not the folder of a run|--run-dir|for this run only",
}
FLAGS = {
    "--n-samples-per-prompt 1": "group of one|--n-samples-per-prompt|at least 2",
    "--global-batch-size 5": "16 samples|5 does not divide|use 4 or 8",
    "--rollout-batchsize 4": "unknown flag|did you mean --rollout-batch-size?",
    "--sglang-tp-size 2": "follows from an engine's GPUs|--rollout-num-gpus-per-engine",
    "--sglang-tp-size 2 --rollout-backend vllm": "not SGLang|--rollout-num-gpus-per-engine",
    "--release-train": "live as long as the run|--release-train|--offload-train",
    "--advantage-estimator ppo --value-clip 0": "above 0|--value-clip",
    "--advantage-estimator ppo --num-critic-only-steps 3": "the run has 2|--num-critic-only-steps|less than 2",
    "--advantage-estimator ppo --megatron-config-path {bad}/roles.yaml": "roles.yaml|overrides.lrr|did you mean lr?",
    "--value-clip 0.1": "no critic without PPO|--value-clip|--advantage-estimator ppo",
    "--rollout-max-response-len 0": "at least 1|--rollout-max-response-len",
    "--rollout-max-prompt-len 128": "context of 128 tokens|--rollout-max-prompt-len|at most 127",
    "--lr fast": "not a number|--lr",
    "--rm-type maths": "not a built-in reward|math, deepscaler|--rm-type",
    "--custom-rm-path nowhere_module.reward": "'nowhere_module'|--custom-rm-path|PYTHONPATH",
    "--custom-rm-path good_hook.py:reward": "is a file: write good_hook.reward|--custom-rm-path",
    "--custom-rm-path good_hook.nothing": "no 'nothing'|--custom-rm-path good_hook.nothing|it has reward",
    "--custom-rm-path raises_hook.reward": "ZeroDivisionError('at import')|--custom-rm-path raises_hook.reward|correct",
    "--custom-rm-path needy_hook.reward": "'a_package_that_is_not_there'|not installed|--custom-rm-path",
}
SFT = {
    "--prompt-data {bad}/one_sided.jsonl": "no assistant turn|one_sided.jsonl, line 3|--skip-bad-rows",
    "--prompt-data {bad}/masked.jsonl": "step_loss_mask 0|masked.jsonl, line 3|--skip-bad-rows",
    "--prompt-data {bad}/text.jsonl": "'hello'|text.jsonl, line 3|--skip-bad-rows",
}


def refused(words: list[str], capsys, monkeypatch, exit_code: int = 2) -> str:
    """Run a command that must end with one error before anything is started; what it printed."""
    from instep import train_sync

    monkeypatch.setattr(train_sync, "train", started)
    assert main(words) == exit_code
    out, error = capsys.readouterr()
    assert out == "" and "Traceback" not in error
    what, *more = error.rstrip().split("\n")
    assert what.split(":")[0] in ("ConfigError", "DataError", "CheckpointError")
    assert [line.split(":")[0].strip() for line in more] == ["where", "remedy"], error
    return error


def missing(expected: str, error: str) -> list[str]:
    return [words for words in expected.split("|") if words not in error]


def started(args):
    raise AssertionError("the run was started")


@pytest.fixture(autouse=True)
def keep_process(monkeypatch):
    """`main` prepares the process for hooks; leave it as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


@pytest.mark.parametrize("given", [*DATA, *CHECKPOINTS, *FLAGS])
def test_an_error_before_anything_starts(bad, tiny, tmp_path, capsys, monkeypatch, given):
    monkeypatch.syspath_prepend(bad)
    places = {"bad": bad, "tiny": tiny}
    expected = {**DATA, **CHECKPOINTS, **FLAGS}[given]
    words = grpo_arguments(tiny, tmp_path / "run", *given.format(**places).split())
    error = refused(words, capsys, monkeypatch)
    assert not missing(expected.format(**places), error), error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", SFT)
def test_sft_needs_conversations_with_an_assistant(bad, tiny, tmp_path, capsys, monkeypatch, given):
    words = ["sft", "--hf-checkpoint", str(tiny / "hf"), "--input-key", "messages", "--rollout-batch-size", "4"]
    words += ["--num-rollout", "1", "--run-dir", str(tmp_path), "--actor-num-gpus-per-node", "1"]
    error = refused([*words, *given.format(bad=bad).split()], capsys, monkeypatch)
    assert not missing(SFT[given], error), error


@pytest.mark.parametrize(
    "folder, expected",
    [
        ("tracker", "'abc' is neither an iteration"),
        ("iteration", "iteration 7"),
        ("state", "its list of files is missing; there is run_state.json"),
    ],
)
def test_load_with_a_broken_tracker_or_state(bad, tiny, tmp_path, capsys, monkeypatch, folder, expected):
    words = grpo_arguments(tiny, tmp_path / "run", "--load", str(bad / folder))
    error = refused(words, capsys, monkeypatch, exit_code=1)
    assert not missing(f"{expected}|{bad / folder}", error), error


def test_a_reward_has_to_be_named(tiny, tmp_path, capsys, monkeypatch):
    words = grpo_arguments(tiny, tmp_path / "run")
    at = words.index("--rm-type")
    error = refused(words[:at] + words[at + 2 :], capsys, monkeypatch)
    assert error.startswith("ConfigError: no reward is named") and not missing("--rm-type|--custom-rm-path", error)


def test_a_file_that_this_user_may_not_read(tiny, tmp_path, capsys, monkeypatch):
    secret = tmp_path / "secret.jsonl"
    secret.write_text((tiny / "train.jsonl").read_text())
    secret.chmod(0)
    words = grpo_arguments(tiny, tmp_path / "run", "--prompt-data", str(secret))
    if os.geteuid() == 0:  # root reads everything, so be somebody else meanwhile
        main([*words, "--lr", "fast"])  # imports what it needs
        capsys.readouterr()
        os.seteuid(65534)
    try:
        assert main(words) == 2
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    error = capsys.readouterr().err  # pytest's folders are root's, so that then more is wrong than this
    assert f"{secret} cannot be read: Permission denied" in error and "change its permissions" in error
    assert "--prompt-data" in error and error.startswith("ConfigError: ") and "Traceback" not in error


@pytest.mark.alone
def test_wrong_rows_are_found_without_torch_and_at_once(bad, tiny, tmp_path):
    words = grpo_arguments(tiny, tmp_path, "--prompt-data", str(bad / "no_label.jsonl"))
    code = (
        "import sys; from instep.cli import main; code = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    seconds = []
    for _ in range(2):  # the better of two: other work may share the machine
        started_at = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *words], env=ENVIRONMENT, capture_output=True, text=True)
        seconds.append(time.perf_counter() - started_at)
        assert done.returncode == 2 and "no_label.jsonl, line 5" in done.stderr, done.stderr
    assert min(seconds) < allowed(1)


def test_checkpoints_are_checked_without_torch(bad, tiny, tmp_path):
    code = (
        "import sys; from instep.cli import main\n"
        "base, *folders = sys.argv[1:]; words = base.split()\n"
        "at = words.index('--hf-checkpoint') + 1\n"
        "for folder in folders:\n"
        "    words[at] = folder; assert main(words) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    folders = [str(bad / name) for name in ("damaged", "cut", "tokenizerless", "templateless", "bert", "t5")]
    command = [sys.executable, "-c", code, " ".join(grpo_arguments(tiny, tmp_path)), *folders]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("remedy") == len(folders), done.stderr


def test_skipped_rows_and_prompts_are_counted_for_the_user(bad, tiny, tmp_path):
    more = ["--prompt-data", str(bad / "mixed.jsonl"), "--skip-bad-rows", "--num-rollout", "1"]
    done = run(grpo_arguments(tiny, tmp_path, *more))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "mixed.jsonl: skipped 1 bad rows; the first: DataError: the row is not JSON" in done.stderr
    assert "mixed.jsonl, line 3" in done.stderr
    assert "mixed.jsonl: skipped 1 prompts of more than 127 tokens" in done.stderr  # its context of 128 is the limit


@pytest.mark.slow
def test_a_prompt_that_the_engine_refuses_is_named(tiny, tmp_path):
    """Without a chat template the prompts are not measured beforehand."""
    write(tmp_path / "text.jsonl", [json.dumps({"prompt": "1" * 200, "label": "1"})] * 4)
    words = grpo_arguments(tiny, tmp_path / "run", "--prompt-data", str(tmp_path / "text.jsonl"))
    done = run([w for w in words if w != "--apply-chat-template"])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the prompt has 200 tokens; 1 to 127 are possible" in done.stderr, done.stderr[-2000:]
    assert f"{tmp_path / 'text.jsonl'}, line" in done.stderr and "--rollout-max-prompt-len" in done.stderr
