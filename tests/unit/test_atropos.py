"""Groups of Atropos' environments as samples, their advantages, and the trainer's side of the API with its bounds."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from instep.data.batch import build_batch
from instep.data.ledger import Ledger
from instep.errors import EngineError, InstepError, RolloutError
from instep.rollout import runtime
from instep.system.ports import free_port
from instep.types import Sample
from instep_neighbours.atropos import normalized_scores, rollout
from instep_neighbours.atropos.client import ApiClient, Registration
from instep_neighbours.atropos.env_api import EnvApi
from instep_neighbours.atropos.groups import Limits, advantages, fault_of_group, refused_in, samples_of
from instep_neighbours.atropos.rollout import _batch, registration_of
from tests.atropos import REGISTRATION, group, serving
from tests.bounds import allowed

# Two turns: 5 6 | 7 8 | 9 10 | 11, where | begins or ends a trained stretch.
TURNS = {
    "tokens": [[5, 6, 7, 8, 9, 10, 11]],
    "masks": [[-100, -100, 7, 8, -100, -100, 11]],
    "scores": [2],
    "inference_logprobs": [[1.0, 1.0, -0.5, -0.25, 1.0, 1.0, -2.0]],
}


def test_several_trained_stretches_are_kept_token_by_token() -> None:
    (sample,) = samples_of(TURNS, 3, 17)
    assert (sample.tokens, sample.response_length) == ([5, 6, 7, 8, 9, 10, 11], 5)
    assert sample.loss_mask == [1, 1, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, -2.0]
    assert (sample.reward, sample.group_index, sample.index) == (2.0, 3, 17)
    spans = [(s.version, s.start, s.end) for s in sample.version_spans]
    assert spans == [("0", 0, 5)]  # older than any weights that a sync has brought
    assert fault_of_group(TURNS) == "" and refused_in(TURNS, Limits(7, 12), takes_advantages=False) == ""


def test_the_first_token_and_sequences_without_a_trained_one() -> None:
    """Nothing predicts the first token, which Atropos' trainer shifts out."""
    tokens = [[5, 6, 7], [5, 6, 7]]
    given = {"tokens": tokens, "masks": [[5, 6, 7], [-100] * 3], "scores": [1, 0], "inference_logprobs": []}
    whole, masked = samples_of(given, 0, 0)
    assert (whole.response_length, whole.loss_mask, whole.rollout_log_probs) == (2, [1, 1], None)
    assert (masked.response_length, masked.loss_mask) == (1, [0])
    batch = build_batch([[whole, masked]])
    assert batch.token_columns["loss_mask"].tolist() == [1, 1, 0]


def test_placeholders_in_the_place_of_log_probs_mean_that_they_are_unknown() -> None:
    (sample,) = samples_of({**TURNS, "inference_logprobs": [[1.0] * 7]}, 0, 0)
    assert sample.rollout_log_probs is None
    some = {**TURNS, "inference_logprobs": [[1.0, 1.0, -0.5, 1.0, 1.0, 1.0, -2.0]]}
    assert "inference_logprobs[0][3] is 1.0" in refused_in(some, Limits(), takes_advantages=False)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 0.9),
        ({"group_overrides": {"temperature": 0.3}}, 0.3),
        ({"group_overrides": {"temperature": 0.3}, "generation_params": {"temperature": 0.5}}, 0.5),
        ({"overrides": [{"temperature": 0.7}], "generation_params": {"temperature": 0.5}}, 0.7),
        ({"overrides": [{"temperature": 0}]}, 1.0),
    ],
)
def test_temperatures(more: dict[str, Any], expected: float) -> None:
    (sample,) = samples_of({**TURNS, **more}, 0, 0, temperature=0.9)
    assert build_batch([[sample]]).sample_columns["temperature"].tolist() == pytest.approx([expected])


def test_what_else_a_group_brings() -> None:
    more = {
        "messages": [[{"role": "user", "content": "x"}]],
        "overrides": [{"set_advantage_to_zero": True, "colour": 1}],
        "group_overrides": {"group_size": 1, "shape": 2},
        "ref_logprobs": [[0.0] * 7],
        "generation_params": {"top_p": 0.5},
        "env_id": 4,
    }
    (sample,) = samples_of({**TURNS, **more}, 0, 0)
    assert sample.metadata["messages"] == more["messages"][0] and sample.sampling_params["top_p"] == 0.5
    assert sample.extra["atropos"] == {"env_id": 4, "zero": True, "unused": ["colour", "ref_logprobs", "shape"]}
    json.dumps(sample.to_dict())


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [[5, 6, 7, 8, 9, 10, -1]]}, "tokens[0]"),
        ({"scores": [1, 2]}, "2 scores"),
        ({"scores": [float("inf")]}, "scores[0]"),
        ({"masks": [[-100] * 6]}, "masks[0]"),
        ({"masks": [[0, 0, 1, 1, 0, 0, 1]]}, "masks[0][0]"),
        ({"inference_logprobs": [[1.0]]}, "inference_logprobs[0]"),
        ({"inference_logprobs": [[float("nan")] * 7]}, "inference_logprobs[0]"),
        ({"advantages": [[1.0] * 7] * 2}, "advantages"),
        ({"overrides": [None]}, "overrides[0]"),
        ({"messages": "hello"}, "messages"),
    ],
)
def test_forms_that_are_refused(more: dict[str, Any], word: str) -> None:
    assert word in fault_of_group({**TURNS, **more})
    assert "JSON" in fault_of_group([])


def test_what_this_run_cannot_train_on_is_named() -> None:
    def refusal(takes_advantages: bool = False, limits: Limits = Limits(), **more: Any) -> str:  # noqa: B008
        return refused_in({**TURNS, **more}, limits, takes_advantages=takes_advantages)

    assert "distill" in refusal(distill_token_ids=[[[1]]]) and refusal(distill_logprobs=[[]]) == ""
    assert (
        "images" in refusal(images=["x"]) and refusal(images=3) and refusal(images=[]) == refusal(images=[None]) == ""
    )
    assert "--custom-advantage-function-path" in refusal(advantages=[[1.0] * 7])
    assert refusal(True, advantages=[[1.0] * 7]) == ""
    assert "more than the 6" in refusal(limits=Limits(num_tokens=6))
    assert "tokenizer_name" in refusal(limits=Limits(vocab_size=11))
    assert "temperature" in refusal(overrides=[{"temperature": "hot"}])


def test_scores_are_compared_as_in_atropos() -> None:
    rng = np.random.default_rng(0)
    samples, expected = list[Sample](), list[float]()
    for number, size in enumerate((4, 1, 2, 8)):
        scores = rng.random(size) if number != 2 else np.full(size, 0.5)
        given = group(size, scores=scores.tolist(), overrides=[{"set_advantage_to_zero": True}] if size == 8 else [])
        samples += samples_of(given, number, len(samples))
        rows = scores if size == 1 else (scores - scores.mean()) / max(scores.std(), 1e-8)  # of the population
        expected += [0.0, *rows[1:]] if size == 8 else rows.tolist()
    raw, values = normalized_scores(None, samples)  # type: ignore[arg-type]
    assert raw == [s.reward for s in samples] and values == pytest.approx(expected, abs=1e-12)


def test_advantages_of_tokens() -> None:
    given = {**TURNS, "advantages": [[0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 3.0]]}
    samples = samples_of(given, 0, 0) + samples_of(TURNS, 1, 1)
    zero = samples_of({**given, "overrides": [{"set_advantage_to_zero": True}]}, 2, 2)
    data: dict[str, Any] = {"samples": samples + zero, "response_lengths": [5, 5, 5]}
    advantages(None, data)  # type: ignore[arg-type]
    assert [row.tolist() for row in data["advantages"]] == [[1, 2, 0, 0, 3], [2.0] * 5, [0.0] * 5]


# ---- the trainer's side ----------------------------------------------------------------------------------------------

TRAINER = Registration(**REGISTRATION)


def next_batch(client: ApiClient, timeout: float = 5.0, trainer: Registration = TRAINER) -> list[int]:
    groups = asyncio.run(client.next_batch(trainer, timeout))
    return [g["tokens"][0][0] for g in groups]


def test_it_registers_and_takes_batches_also_of_an_api_that_has_begun_anew() -> None:
    port = free_port()
    with serving(port) as api:
        client = ApiClient(api.url + "/")
        api.post("/scored_data_list", [group(4, first=first) for first in range(20, 24)])
        assert next_batch(client) == [20, 21] and next_batch(client) == [22, 23]
        assert api.get("/info")["batch_size"] == 8
    with serving(port) as api:
        api.post("/scored_data_list", [group(4, first=first) for first in (30, 31)])
        assert next_batch(client) == [30, 31] and api.get("/wandb_info") == {"group": "g", "project": "p"}


def test_waits_have_a_bound(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep_neighbours.atropos.client.FIRST_CONTACT", 0.2)
    port, begun = free_port(), time.monotonic()
    client = ApiClient(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineError, match=r"has not answered for \d+ s.*") as caught:
        next_batch(client)
    assert "instep env-api" in caught.value.remedy and client.url in caught.value.where
    with serving(port) as api:
        monkeypatch.setattr("instep_neighbours.atropos.client.FIRST_CONTACT", 10.0)
        monkeypatch.setattr("instep_neighbours.atropos.client.TELL_AFTER", 0.1)
        with pytest.raises(RolloutError, match="no group waits in the API; no environment has registered") as waited:
            next_batch(client, 2.0)
        assert re.search("no batch of 8 sequences has come for [0-2] s", caplog.text)
        api.register_env()
        assert "--atropos-timeout" in waited.value.remedy and "rollout_server_url" in waited.value.remedy
        api.post("/scored_data", group(3))
        with pytest.raises(RolloutError, match=r"1 groups wait in the API; environment 0 \(e\) sent its last request"):
            next_batch(client, 2.0)
    with pytest.raises(EngineError, match="has not answered"):
        next_batch(client, 0.3)
    assert "does not answer any more" in caplog.text and time.monotonic() - begun < allowed(15)


def test_an_api_that_hangs_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment is blamed, and a batch is asked for once: each question that is answered later costs one."""

    async def hang(self: EnvApi, request: Any) -> Any:
        asked.append(request.path)
        await asyncio.sleep(60)

    asked = list[str]()
    monkeypatch.setattr("instep_neighbours.atropos.client.FIRST_CONTACT", 0.3)
    monkeypatch.setattr("instep_neighbours.atropos.client.TELL_AFTER", 0.1)
    begun = time.monotonic()
    words = "has not answered for [0-3] s"
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(EngineError, match=words):
        next_batch(ApiClient(f"http://127.0.0.1:{mute.getsockname()[1]}"))
    monkeypatch.setattr("instep_neighbours.atropos.client.FIRST_CONTACT", 10.0)
    monkeypatch.setattr(EnvApi, "batch", hang)
    with serving() as api, pytest.raises(EngineError, match=f"{words}: TimeoutError"):
        next_batch(ApiClient(api.url), 0.6)
    assert asked == ["/batch"] and "has not answered /batch for 0 s; it has 1 s in all" in caplog.text
    assert time.monotonic() - begun < allowed(10)


def test_an_api_of_another_trainer() -> None:
    with serving() as api:
        api.register(batch_size=16)
        with pytest.raises(RolloutError, match="batches of 16 sequences.*has 8") as caught:
            next_batch(ApiClient(api.url))
        assert "reset_data" in caught.value.remedy
        with pytest.raises(EngineError, match="not an Atropos API"):
            next_batch(ApiClient(api.url + "/elsewhere"))


def run_args(url: str, **more: Any) -> Any:
    """The settings that the rollout function reads."""
    own: dict[str, Any] = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "skip_failed_groups": False,
        "hf_checkpoint": None,
    }
    own |= {"custom_advantage_function_path": None, "atropos_timeout": 5.0, "rollout_max_context_len": 40}
    own |= {"save": None, "run_dir": "runs/x", "save_interval": None, "num_rollout": 7, "vllm_config": None}
    own |= {"vllm_max_model_len": None, "wandb_group": None, "wandb_project": "p", "served_models": []}
    return SimpleNamespace(**own | more, atropos_url=url)


def test_groups_that_cannot_be_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "limits_of", lambda args: Limits(40, None))
    with serving() as api:
        args = run_args(api.url)
        registration = registration_of(args, 3)
        assert (registration.batch_size, registration.starting_step, registration.max_token_len) == (8, 3, 40)
        groups = [group(4, 0, first=first) for first in range(20, 28)]
        groups[1]["images"] = ["x"]
        api.post("/scored_data_list", groups)
        args.skip_failed_groups = True
        found, num_refused = asyncio.run(_batch(args, ApiClient(api.url), registration))
        assert [g["tokens"][0][0] for g in found] == [20, 22] and num_refused == 1
        assert api.batches() == [[24, 25], [26, 27]] and api.get("/status")["queue_size"] == 1  # 23 is back
        api.post("/scored_data", groups[1])
        args.skip_failed_groups = False
        with pytest.raises(RolloutError, match="images") as caught:
            asyncio.run(_batch(args, ApiClient(api.url), registration))
        assert re.search("environment 0", caught.value.where) and isinstance(caught.value, InstepError)


def test_groups_are_refused_and_taken_again_for_so_long(monkeypatch, caplog) -> None:
    """With --skip-failed-groups: all are refused; the others are larger than what is missing; and the API goes."""
    monkeypatch.setattr(rollout, "limits_of", lambda args: Limits(40, None))
    monkeypatch.setattr(rollout, "LONGEST_PAUSE", 0.05)
    with serving() as api:
        args = run_args(api.url, skip_failed_groups=True, atropos_timeout=0.4)
        client, registration = ApiClient(api.url), registration_of(args, 3)
        api.post("/scored_data_list", [group(4, images=["x"])] * 20)
        with pytest.raises(RolloutError, match="9 groups of a rollout are refused and 0 kept; the last: images"):
            asyncio.run(_batch(args, client, registration))
        assert caplog.text.count("is dropped") == 3
        api.get("/reset_data")
        api.post("/scored_data_list", [group(4, images=["x"]), group(4), group(8)])
        with pytest.raises(RolloutError, match="no group of at most 4 sequences came within 0 s"):
            asyncio.run(_batch(args, client, registration))
        status = api.get("/status")
        assert status["queue_size"] == 1 and 3 + 1 < status["current_step"] < 3 + 12  # given back with pauses
    asyncio.run(client.give_back([group(8)]))
    assert "1 groups are lost, which the Atropos API" in caplog.text


@pytest.mark.parametrize("path", [None, "instep_neighbours.atropos.normalized_scores"])
def test_a_rollout(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str | None) -> None:
    """Numbers that go on, texts, metrics of each environment, and an advantage of zero with other estimators."""
    monkeypatch.setattr(rollout, "limits_of", lambda args: Limits(40, None))
    monkeypatch.setattr(rollout, "tokenizer_of", lambda args: SimpleNamespace(decode=str))
    data = SimpleNamespace(ledger=SimpleNamespace(num_issued=12))
    with serving() as api:
        args = run_args(api.url, custom_reward_post_process_path=path, rollout_temperature=1.0, pause_mode="abort")
        args.debug_train_only = False
        zero = {"overrides": [{"set_advantage_to_zero": True, "odd": 1}]}
        api.post("/scored_data_list", [group(4, 0), group(2, 1, **zero), group(2, 1)])
        output = rollout.generate_rollout(args, 3, data)
        assert api.get("/status")["current_step"] == 4
    runtime.shutdown()
    assert [[s.group_index for s in g] for g in output.samples] == [[12] * 4, [13] * 2, [14] * 2]
    samples = [s for g in output.samples for s in g]
    assert [s.index for s in samples] == list(range(24, 32)) and samples[0].response == "[7, 8]"
    assert [s.remove_sample for s in samples] == [path is None and i == 4 for i in range(8)]
    assert output.metrics["atropos/env_1_share"] == 0.5 and output.metrics["atropos/env_0_score"] == 1.5
    assert "send odd" in caplog.text and "--pause-mode keep" in caplog.text


def test_numbers_of_groups_go_on_after_a_resume() -> None:
    """`generate_rollout` counts from the ledger's, so that numbers have no gaps and none is used twice."""
    ledger = Ledger()
    for rollout_id in range(2):
        groups = [samples_of(group(2), ledger.num_issued + n, 0) for n in range(3)]
        ledger.adopt(groups, rollout_id)
        ledger.finish(groups)
        ledger.consume(groups)
    again = Ledger()
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again.num_issued == 6 and ledger.state_dict()["closed_above"] == []
