"""`--config FILE`: flags in a YAML file are read as the same words on the command line; `--dump-config` writes one."""

from pathlib import Path

import pytest

from instep.arguments.config_file import expanded
from instep.arguments.parse import parse
from instep.errors import ConfigError
from tests.command_line import make_folder

TEXT = """
hf_checkpoint: model
prompt-data: data.jsonl   # with dashes or underscores
label-key: label
rollout-batch-size: 4
num-rollout: 3
lr: 1e-6
rm-type: math
actor-num-gpus-per-node: 1
rollout-stop: ["\\n", "--end"]
rollout-stop-token-ids: [1, 2]
eval-prompt-data: {held-out: data.jsonl, 007: data.jsonl}
apply-chat-template: true
use-tis: off
apply-chat-template-kwargs: {enable_thinking: false, levels: [1, 2.5]}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    Path("mine.yaml").write_text(TEXT)
    return tmp_path


def dumped(words: list[str], file: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse([*words, "--dump_config", file])
    assert end.value.code == 0
    return "".join(line for line in Path(file).open() if not line.startswith("#"))


def test_a_file_is_read_as_its_words():
    words = """--hf-checkpoint model --prompt-data data.jsonl --label-key label --rollout-batch-size 4 --num-rollout 3
    --lr 1e-6 --rm-type math --actor-num-gpus-per-node 1 --rollout-stop-token-ids 1,2 --eval-prompt-data held-out
    data.jsonl 007 data.jsonl --apply-chat-template""".split()
    words += ["--rollout-stop", "\n", "--rollout-stop=--end"]
    words += ["--apply-chat-template-kwargs", '{"enable_thinking": false, "levels": [1, 2.5]}']
    for command in ("train", "train-async", "plan"):
        args = parse(["--config", "mine.yaml"], command)
        assert args.replace(config=None) == parse(words, command) and args.config == "mine.yaml"
    assert parse(["--config=mine.yaml"]).rollout_stop == ["\n", "--end"]


def test_words_win():
    args = parse("--lr 2e-6 --config mine.yaml --eval_prompt_data x data.jsonl --apply-chat-template false".split())
    assert (args.lr, [d.name for d in args.eval_datasets], args.apply_chat_template) == (2e-6, ["x"], False)
    Path("mine.yaml").write_text(TEXT + "colocate: true\noffload-train: true\n")
    assert not parse("--config mine.yaml --no-offload-train".split()).offload_train
    assert parse("--config mine.yaml --device cuda".split()).offload_train


def test_serve_reads_a_file():
    Path("mine.yaml").write_text("hf-checkpoint: model\nvllm-max-model-len: 2k\n")
    assert parse(["--config", "mine.yaml"], "serve").vllm_max_model_len == 2000


def test_dumped_and_read_again():
    text = dumped(["--config", "mine.yaml", "--lr", "3e-6", "--wandb-key", "hidden", "--use-wandb"], "once.yaml")
    assert 'rollout-stop:\n- "\\n"\n- --end\n' in text and text.startswith("lr: 3e-6\n") and "hidden" not in text
    assert Path("once.yaml").read_text().splitlines()[1] == "# --wandb-key is a secret: give it on the command line"
    assert dumped(["--config", "once.yaml"], "new/twice.yaml") == text
    typed = parse(["--config", "mine.yaml", "--lr", "3e-6", "--use-wandb"])
    assert parse(["--config", "once.yaml"]) == typed.replace(config="once.yaml")
    with pytest.raises(ConfigError, match="would replace"):
        parse(["--config", "mine.yaml", "--dump-config", "mine.yaml"])


def test_mappings_are_read_by_the_rules_of_json():
    text = "{a: 1e-6, b: no, on: '1', c: [on, true, -2], d: null, 007: 010, e: 2026-01-01, f: {g: \"x\"}}"
    Path("mine.yaml").write_text(TEXT.replace("{enable_thinking: false, levels: [1, 2.5]}", text))
    known = {"a": 1e-6, "b": "no", "on": "1", "c": ["on", True, -2], "d": None, "007": "010", "e": "2026-01-01"}
    assert parse(["--config", "mine.yaml"]).apply_chat_template_kwargs == {**known, "f": {"g": "x"}}


def test_text_that_looks_like_null_is_dumped_in_quotes():
    text = dumped(["--config", "mine.yaml", "--rollout-stop", "null", "--rollout-stop", "~"], "once.yaml")
    assert "rollout-stop: ['null', '~']\n" in text and "lr: 1e-6\n" in text
    assert parse(["--config", "once.yaml"]).rollout_stop == ["null", "~"]


def test_urls_with_credentials_are_not_dumped():
    secret = ["--trackio-server-url", "https://host/?write_token=S3", "--rm-url", "https://user:S3@host/score"]
    more = ["--use-trackio", "--rm-type", "remote_rm", "--use-wandb", "--wandb-host", "http://h:1/"]
    text = dumped(["--config", "mine.yaml", *secret, *more], "once.yaml")
    assert "S3" not in Path("once.yaml").read_text() and "wandb-host: http://h:1/\n" in text
    comments = [line for line in Path("once.yaml").read_text().splitlines() if "holds a secret" in line]
    assert comments == [f"# {name} holds a secret: give it on the command line" for name in secret[::2]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: 1e-6\nrolout-batch-size: 4", ["--rolout-batch-size (wrong.yaml, line 2)", "--rollout-batch-size?"]),
        ("\nlr: fast", ["--lr (wrong.yaml, line 2)", "'fast' is not a number"]),
        ("rollout-batch-size: 3\nglobal-batch-size: 5", ["--global-batch-size (wrong.yaml, line 2)"]),
        ("lr: [1, 2]", ["line 1", "one value, not a list"]),
        ("lr: 1\nLR: [\n", ["wrong.yaml, line 3", "not YAML"]),
        ("lr: 1\nlr: 2", ["wrong.yaml, line 2", "'lr' stands in line 1, too"]),
        ("- lr", ["wrong.yaml, line 1", "not a mapping"]),
        ("lr: 1\nconfig: b.yaml", ["wrong.yaml, line 2", "cannot stand in a file"]),
        ("rollout-stop: [[a]]", ["line 1", "text and numbers only"]),
        ("lr:", ["wrong.yaml, line 1", "'lr' has no value", "remove the line"]),
        ("lr: 1\nsave: null", ["wrong.yaml, line 2", "'save' has no value"]),
        ("save: ~", ["wrong.yaml, line 1", "'save' has no value"]),
        ("rollout-stop: [a, null]", ["wrong.yaml, line 1", "'rollout-stop' has no value"]),
        ("eval-prompt-data: {x: }", ["wrong.yaml, line 1", "'eval-prompt-data' has no value"]),
        ("apply-chat-template-kwargs: {[a]: 1}", ["wrong.yaml, line 1", "is not JSON"]),
    ],
)
def test_mistakes_name_file_and_line(text, words):
    Path("wrong.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", "wrong.yaml"])
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_file_that_is_not_there():
    for words in (["--config", "none.yaml"], ["--config"], ["--config", "mine.yaml", "--config", "mine.yaml"]):
        with pytest.raises(ConfigError, match="No such file|takes one file"):
            expanded(words)
