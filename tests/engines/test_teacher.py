"""The served teacher of on-policy distillation against a running engine: its log-probs are plain transformers'."""

from __future__ import annotations

import random
import socket
import time

import pytest
import torch
from transformers import AutoTokenizer

from instep.errors import EngineError, RolloutError
from instep.rollout import runtime
from instep.rollout.teacher import teacher_at
from instep.system.ports import free_port
from instep.types import TokenBatch
from tests import keys
from tests.bounds import allowed
from tests.engines.running import MAX_MODEL_LEN


@pytest.fixture(autouse=True)
def _end_of_the_loop(request):
    if "engine" in request.fixturenames:
        keys.knowing(request.getfixturevalue("engine").url)
    yield
    runtime.shutdown()


def batch_of(samples: list[tuple[int, int]], longest: int = 290) -> TokenBatch:
    """Random tokens in samples of (prompt, response) tokens; the second has no token to train on."""
    rng = random.Random(2)
    total = torch.tensor([p + r for p, r in samples])
    lengths = torch.tensor([r for _, r in samples])
    mask = torch.cat([torch.full((r,), float(i != 1)) for i, (_, r) in enumerate(samples)])
    tokens = torch.tensor([rng.randrange(3, longest) for _ in range(int(total.sum()))])
    return TokenBatch(tokens, total, lengths, {"loss_mask": mask}, {"temperature": torch.ones(len(samples))})


def test_log_probs_are_those_of_the_model(engine):
    batch = batch_of([(5, 7), (3, 4), (1, 9), (20, 1), (4, 30)])
    got = teacher_at(engine.url, 60).log_probs(batch)
    expected = []
    for i, tokens in enumerate(batch.tokens.split(batch.total_lengths.tolist())):
        length = int(batch.response_lengths[i])
        with torch.no_grad():
            log_p = engine.hf(tokens[None]).logits[0, -length - 1 : -1].log_softmax(-1)
        expected.append(log_p.gather(1, tokens[-length:, None])[:, 0] * (i != 1))
    assert got.dtype is torch.float32 and got.shape == batch.token_columns["loss_mask"].shape
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_the_engines_own_tokenizer_is_accepted(engine):
    longest = teacher_at(engine.url, 60).check(AutoTokenizer.from_pretrained(engine.path))
    assert longest == MAX_MODEL_LEN - 1  # of prompt and response: a token has to follow


def test_a_sample_that_is_too_long_for_the_teacher_names_both(engine):
    with pytest.raises(EngineError, match="prompt has 1100 tokens|length 1100") as error:
        teacher_at(engine.url, 60).log_probs(batch_of([(1000, 100)]))
    assert f"--opd-teacher-url {engine.url}" in error.value.where and error.value.remedy


def test_tokens_outside_of_its_vocabulary_are_refused(engine):
    with pytest.raises(EngineError, match="out(side the| of) vocabulary"):
        teacher_at(engine.url, 60).log_probs(batch_of([(5, 40)], longest=4000))


def test_another_temperature_is_refused(engine):
    batch = batch_of([(5, 7)])
    batch.sample_columns["temperature"][0] = 0.7
    with pytest.raises(RolloutError, match="another temperature"):
        teacher_at(engine.url, 60).log_probs(batch)


def test_a_teacher_that_is_not_there_is_an_error_within_seconds():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match="the teacher gave no answer: 5 attempts failed") as error:
        teacher_at(url, 60).log_probs(batch_of([(5, 7)]))
    assert url in error.value.where


def test_a_teacher_that_never_answers_is_an_error_in_its_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, began = f"http://127.0.0.1:{silent.getsockname()[1]}", time.monotonic()
        with pytest.raises(EngineError, match="the teacher gave no answer") as error:
            teacher_at(url, 1.0).log_probs(batch_of([(5, 7)]))
    assert url in error.value.where and time.monotonic() - began < allowed(5)


def test_an_address_without_the_routes_of_an_engine(engine):
    with pytest.raises(EngineError, match="the teacher gave no answer") as error:
        teacher_at(f"{engine.url}/v2", 60).check(AutoTokenizer.from_pretrained(engine.path))
    assert "404" in error.value.what
