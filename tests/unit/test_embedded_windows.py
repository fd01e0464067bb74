"""The embedded engine's sliding windows, against attention of transformers itself."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.engines.embedded.model import Runner, load_model
from instep.engines.embedded.sampling import log_softmax
from instep.errors import CheckpointError
from tests.families import FAMILIES, make_family
from tests.unit.test_unknown_families import make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@torch.no_grad()
def test_rows_longer_than_the_window_have_the_logits_of_transformers(tmp_path, family):
    path, window = make_family(family, tmp_path, "fp32"), FAMILIES[family].settings["sliding_window"]
    runner = Runner(load_model(str(path), torch.float32, CPU, 64, False), 4, 64)
    eager = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    full = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, sliding_window=64).eval()
    rows = torch.randint(0, 64, (2, 40)).tolist()
    prompts = [rows[0][: window + 5], rows[1][: window - 3]]  # one is longer than the window, one grows to be
    given = [runner.prefill([prompt], [0], i)[0] for i, prompt in enumerate(prompts)]
    for _ in range(12):
        for logits, prompt in zip(given, prompts, strict=True):
            want = eager(torch.tensor([prompt])).logits[0, -1]
            torch.testing.assert_close(logits, want, atol=2e-5, rtol=1e-5)
        prompts = [row[: len(prompt) + 1] for row, prompt in zip(rows, prompts, strict=True)]
        given = runner.decode([prompt[-1] for prompt in prompts], [len(prompt) for prompt in prompts])
    assert (full(torch.tensor([prompts[0]])).logits[0, -1] - given[0]).abs().max() > 1e-3  # a window is seen at all
    own = torch.tensor(prompts[0])
    want = eager(own[None]).logits[0, :-1].log_softmax(-1).gather(1, own[1:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([place[0][1] for place in runner.score(prompts[0])]), want, atol=2e-5, rtol=0
    )


def test_attention_that_it_does_not_have_is_refused_when_it_starts(tmp_path):
    path = make_family("gemma2", tmp_path, "fp32")
    with pytest.raises(CheckpointError, match="cannot serve this model, because its attention caps scores") as error:
        load_model(str(path), torch.float32, CPU, 64, False)
    assert error.value.remedy == "use --rollout-backend vllm"
    path = make_model("olmo_hybrid", tmp_path)
    with pytest.raises(CheckpointError, match="it has layers of another kind \\(linear_attention\\)"):
        load_model(str(path), torch.float32, CPU, 64, False)


def test_log_probs_of_a_large_vocabulary_are_not_off_by_their_sum():
    logits = 3 * torch.randn(4, 262_144, generator=torch.Generator().manual_seed(0))
    assert (log_softmax(logits) - logits.double().log_softmax(-1)).abs().max() < 4e-6
