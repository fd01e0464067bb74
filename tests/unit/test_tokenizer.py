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

from instep.data import tokenizer
from instep.engines.embedded import scheduler
from instep.engines.embedded.__main__ import load_engine
from tests.assets import make_checkpoint


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
    args = Namespace(**given, trust_remote_code=False, batch_invariant=False, enable_return_routed_experts=False)
    monkeypatch.setattr(scheduler, "Scheduler", lambda *_: SimpleNamespace(calls=dict, vocab_size=1))
    told: list[dict[str, object]] = []
    load_engine(args, SimpleNamespace(send=told.append))
    assert told[0]["eos_ids"] == ends
    assert (f"{left_out} end no response" in capfd.readouterr().err) == bool(left_out)
