"""The examples of docs/hooks.md: each is called in the way in which a run calls it, those of rollouts with an engine.

Those of Megatron run in tests/distributed: test_megatron_hooks.py and test_layer_spec.py.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples import hooks
from instep.engines.engine import Engine
from instep.rollout.outputs import as_eval_output, as_train_output
from instep.rollout.tokens import tokenizer_of
from instep.rollout.vllm_rollout import generate_rollout
from instep.system.hooks import Hook
from tests.engines.rollouts import rollout, source_of
from tests.unit.test_hook_errors import WAYS, current, folder, parsed  # noqa: F401

ROOT = Path(__file__).parents[2]
DOC = runpy.run_path(str(ROOT / "scripts/docs/hooks.py"))
ENTRIES = {entry.flag: entry for entry in DOC["ENTRIES"]}
WITH_AN_ENGINE = {"--rollout-function-path", "--custom-generate-function-path"}
NAME = "examples.hooks.{}".format


def test_the_document_is_up_to_date_and_has_every_hook() -> None:
    assert set(ENTRIES) == {flag.name for flag in DOC["acting"]()} == set(WAYS)
    text = (ROOT / "docs/hooks.md").read_text()
    assert text == DOC["markdown"](), "python scripts/docs/hooks.py > docs/hooks.md"


@pytest.mark.parametrize("flag", [f for f in ENTRIES if f not in WITH_AN_ENGINE and "megatron" not in ENTRIES[f].more])
def test_an_example_does_what_its_flag_wants(flag: str, parsed: Callable[..., Any]) -> None:  # noqa: F811
    entry, asked = ENTRIES[flag], []
    example = getattr(hooks, entry.example)

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return example(*args, **kwargs)

    current["does"] = noted
    WAYS[flag](lambda *words: parsed(*words, *entry.more.split()))
    assert asked


def test_examples_of_a_rollout_together(make_args: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        *("--data-source-path", "--custom-rm-path", "--rollout-sample-hook-path", "--rollout-sample-filter-path"),
        *("--dynamic-sampling-filter-path", "--rollout-all-samples-process-path"),
    ]
    flags = [word for flag in names for word in (flag, NAME(ENTRIES[flag].example))]
    args = make_args(*flags, "--reward-key", "brevity", "--over-sampling-batch-size", "6")
    source = source_of(args)
    source.source = hooks.DataSource(args)
    samples = [s for group in rollout(args, source).samples for s in group]
    assert all(s.metadata["one_of"] == 24 and s.metadata["num_words"] >= 0 for s in samples)
    assert all(s.remove_sample == s.truncated and set(s.reward) == {"score", "brevity"} for s in samples)
    assert "groups were finished; the data source has 24 prompts" in capsys.readouterr().out


def test_two_turns_and_a_whole_rollout(make_args: Callable[..., Any]) -> None:
    """A second turn follows one that has ended; one that was cut off stays the last."""
    flag, whole = "--custom-generate-function-path", "--rollout-function-path"
    ends = [str(i) for i in range(10, 53, 8)]  # so that some turns of the random model end
    more = ("--rollout-max-response-len", "24", "--rollout-stop-token-ids", *ends)
    args = make_args(flag, NAME(ENTRIES[flag].example), whole, NAME(ENTRIES[whole].example), *more)
    hook = Hook(whole, args.rollout_function_path)
    output = as_train_output(hook.call(args, 0, source_of(args), evaluation=False), hook)
    assert output.metrics["rollout/mine"] == 1.0 and len(output.samples) == 4
    num_turns = set()
    for sample in (s for group in output.samples for s in group):
        mask, response = sample.loss_mask, sample.tokens[sample.prompt_length :]
        num_turns.add(1 + (0 in mask))
        if 0 not in mask:
            assert sample.response_length == 12 and sample.truncated
            continue
        tokenizer = tokenizer_of(args)
        between = tokenizer.decode([i for i, m in zip(response, mask, strict=True) if not m])
        last = response[mask.index(0) - 1]
        assert last == tokenizer.eos_token_id or str(last) in ends
        assert between.startswith("<|im_end|>") == (last != tokenizer.eos_token_id) and "<|im_start|>" in between
    assert num_turns == {1, 2}


def test_the_agent_of_the_documents(
    make_args: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random model asks for no tool, so each turn that has ended counts as one that does."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL)
    assert code and code[1].count('or "<tool>" not in first.response') == 1
    text = code[1].replace('or "<tool>" not in first.response', "") + "\n\ndef my_tool(text):\n    return '42'\n"
    (tmp_path / "my_agent.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    ends = [str(i) for i in range(10, 53, 8)]
    more = ("--rollout-max-response-len", "24", "--rollout-stop-token-ids", *ends)
    args = make_args("--custom-generate-function-path", "my_agent.generate", *more)
    samples = [s for group in rollout(args).samples for s in group]
    asked = [s for s in samples if 0 in s.loss_mask]
    assert 0 < len(asked) and {s.response_length for s in samples if s not in asked} <= {24}
    between = [[i for i, m in zip(s.tokens[s.prompt_length :], s.loss_mask, strict=True) if not m] for s in asked]
    assert all("42" in tokenizer_of(args).decode(ids) for ids in between)


def test_an_evaluation(make_args: Callable[..., Any], data: Path, server: Engine) -> None:
    args = make_args("--eval-prompt-data", "sums", str(data), "--eval-interval", "1")
    output = hooks.generate_rollout(args, 0, None, evaluation=True)
    assert len(as_eval_output(output).data["sums"]["rewards"]) == len(
        generate_rollout(args, 0, None, evaluation=True).data["sums"]["rewards"]
    )


def test_hooks_of_one_evaluation_set(
    make_args: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} + 1 =", "label": "2"}) + "\n" for i in (1, 2))
    )
    monkeypatch.chdir(tmp_path)
    args = make_args("--eval-config", str(ROOT / "examples/eval.yaml"), "--eval-interval", "1")
    data = generate_rollout(args, 0, None, evaluation=True).data
    brief, two_turns = data["brief"], data["two_turns"]
    assert brief["rewards"] == [1 / (1 + s.response_length) for s in brief["samples"]]
    assert [set(s.reward) for s in brief["samples"]] == [{"score", "brevity"}] * 2
    assert two_turns["rewards"] == [0.0] * 2  # of its rm_type
    half = args.rollout_max_response_len // 2
    assert all(s.response_length == half or 0 in s.loss_mask for s in two_turns["samples"])
