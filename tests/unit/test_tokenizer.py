"""The tokenizer of a checkpoint."""

from __future__ import annotations

import json
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tokenizers import processors

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.controller.run_state import changed_arguments
from instep.data import tokenizer
from instep.data.source import load_source
from instep.data.tokenizer import load_tokenizer, text_ids
from instep.engines.embedded import scheduler
from instep.engines.embedded.__main__ import load_engine
from instep.errors import ConfigError
from instep.rollout import dpo_rollout, tokens
from instep.training.worker import Worker
from instep.types import Sample
from instep.weights.spec import TensorSpec
from tests.assets import make_checkpoint, make_prompts, make_tokenizer


def test_two_threads_that_need_a_tokenizer_first_do_not_import_it_at_once(tmp_path, monkeypatch) -> None:
    """As the thread of a rollout ahead and the controller's do after a resume; a module in the place of transformers
    finds its names as that one does, and fails where two ask at once."""
    busy, module = threading.Lock(), ModuleType("transformers")

    def find(name: str) -> object:
        if name != "AutoTokenizer" or not busy.acquire(blocking=False):
            raise AttributeError(name)
        time.sleep(0.2)
        busy.release()
        return SimpleNamespace(from_pretrained=lambda path, **_: f"of {path}")

    module.__getattr__ = find  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "transformers", module)
    paths = [str(tmp_path / name) for name in "ab"]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda path: tokenizer.load_tokenizer(path, False), paths))
    assert found == [f"of {path}" for path in paths]


@pytest.mark.parametrize(
    "config,generation,ends,left_out",
    [  # <|endoftext|> is 0, the tokenizer's own <|im_end|> 2; 5 is an ordinary token
        (0, None, {0, 2}, []),
        (5, None, {2}, [5]),
        (5, [0], {0, 2}, []),
        (0, [2, 5], {2}, [5]),
    ],
)
def test_the_embedded_engine_ends_where_vllm_does(
    tmp_path, capfd, monkeypatch, config: int, generation: list[int] | None, ends: set[int], left_out: list[int]
) -> None:
    folder = make_checkpoint(tmp_path / "hf")
    (folder / "generation_config.json").unlink(missing_ok=True)
    settings = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config}
    (folder / "config.json").write_text(json.dumps(settings))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    given = dict(model=str(folder), dtype="float32", device="cpu", max_model_len=None, max_num_seqs=1)
    given |= dict(chat_template=None)
    args = Namespace(**given, trust_remote_code=False, batch_invariant=False, enable_return_routed_experts=False)
    monkeypatch.setattr(scheduler, "Scheduler", lambda *_: SimpleNamespace(calls=dict, vocab_size=1))
    told: list[dict[str, object]] = []
    load_engine(args, SimpleNamespace(send=told.append))
    assert told[0]["eos_ids"] == ends
    assert (f"token ids {left_out} do not end a response" in capfd.readouterr().err) == bool(left_out)


@pytest.fixture
def begun(tmp_path):
    """The folder of a tokenizer that begins a text with <|im_start|>, as Gemma's and Llama's do with theirs."""
    made = make_tokenizer()
    made.bos_token = "<|im_start|>"
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    made.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def settings_of(folder, *words: str):
    data = folder.parent / "data.jsonl"
    words = ("--prompt-data", str(data), "--rollout-batch-size", "1", "--num-rollout", "1", *words)
    return parse([*words, "--hf-checkpoint", str(folder), "--input-key", "prompt"], "plan")


def test_the_begin_of_text_token_is_added_where_it_is_asked_for_and_never_twice(begun, caplog) -> None:
    tokenizer = load_tokenizer(str(begun), False)
    talk = [{"role": "user", "content": "1"}]
    bare, whole = tokenizer("1+1=", add_special_tokens=False)["input_ids"], tokenizer("1+1=")["input_ids"]
    rendered = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert whole == [1, *bare] and rendered[0] == 1
    for words, ids in (((), bare), (("--add-bos-token",), whole)):
        args = settings_of(begun, *words)
        assert tokens.prompt_ids(args, Sample(prompt="1+1=")) == ids
        assert tokens.prompt_ids(args, Sample(prompt="<|im_start|>1+1=")) == whole
        assert tokens.prompt_ids(args, Sample(prompt=talk)) == rendered
        pair = Sample(prompt="1+1=", label={"chosen": "2", "rejected": "3"}, group_index=0)
        for answer, sample in zip("23", dpo_rollout._pair(args, pair), strict=True):
            assert sample.tokens == [*ids, *tokenizer.convert_tokens_to_ids([answer, "<|im_end|>"])]
        rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "<|im_start|>1+1="}]
        (begun.parent / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        for limit, num in ((4, 2 - len(words) - 1), (5, 2)):
            limited = args.replace(rollout_max_prompt_len=limit)
            if num:
                caplog.clear()
                assert len(load_source(limited, limited, 100)) == num
                assert ("begins a text with <|im_start|>" in caplog.text) == (not words)
    with pytest.raises(ConfigError, match="no begin-of-text token"):
        text_ids(make_tokenizer(), "1", True)


class OneWeight:
    specs, emits = [TensorSpec("model.norm.weight", (2,), torch.float32)], True

    def __iter__(self):
        return iter([(self.specs[0], torch.ones(2))])


def test_a_chat_template_of_a_file_is_that_of_data_engines_and_exports(tmp_path) -> None:
    hf, file = make_checkpoint(tmp_path / "hf", layers=1), tmp_path / "plain.jinja"
    make_prompts(tmp_path / "data.jsonl", 1)
    file.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    words = ["--chat-template", str(file), "--apply-chat-template", "--rollout-num-gpus", "1", "--train-backend", "hf"]
    args = settings_of(hf, *words)
    (group,) = load_source(args, args).get_samples(1)
    assert group[0].prompt.endswith("=?!")
    assert tokens.prompt_ids(args, Sample(prompt=[{"role": "user", "content": "1"}])) == text_ids(
        make_tokenizer(), "1!"
    )
    for backend in ("embedded", "vllm"):
        (engine,) = plan_engines(settings_of(hf, *words, "--rollout-backend", backend))
        assert engine.flags[engine.flags.index("--chat-template") + 1] == str(file)
    worker = Worker(lambda event: None)
    worker.args, worker.backend = args, SimpleNamespace(weight_source=OneWeight)
    worker.export_hf(tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out"), False).chat_template == file.read_text()
    file.write_text("{{ messages }}")
    changed = settings_of(hf, *words)
    with pytest.raises(ConfigError, match="--chat-template-text was .* and is"):
        changed_arguments(args.to_dict(), changed)
    file.unlink()
    with pytest.raises(ConfigError, match="has no text"):
        parse(["--hf-checkpoint", str(hf), "--chat-template", str(file)], "serve")
