"""Requests to the server for TRL's clients that are refused, or do what they say; and who they come from."""

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from transformers import AutoTokenizer

from instep.system.ports import free_port
from instep_neighbours.trl import forms
from instep_neighbours.trl.clients import BadRequest, Connection
from instep_neighbours.trl.receiver import Meeting, _store, careful_group
from instep_neighbours.trl.texts import Texts, template_options
from tests.assets import make_checkpoint
from tests.bounds import allowed


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("m") / "hf")


@pytest.mark.vllm
def test_an_id_of_nccl_is_read_from_a_store_and_nothing_else():
    """As the installed vLLM pickles it, and names a barrier."""
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
    from vllm.distributed.utils import StatelessProcessGroup

    store, sent = dist.HashStore(), ncclUniqueId()
    sent.internal[:] = range(-64, 64)
    trainer, ours = StatelessProcessGroup(0, 2, store), careful_group(store, 1)
    for value in (sent, "barrier_1", b"gloo"):
        trainer.broadcast_obj(value, 0)
    got, name, data = (ours.broadcast_obj(None, 0) for _ in range(3))
    assert bytes(got) == bytes(sent) and isinstance(got, ncclUniqueId) and (name, data) == ("barrier_1", b"gloo")
    trainer.broadcast_obj(Meeting("127.0.0.1", 1, 0, "cpu", 1.0), 0)
    with pytest.raises(RuntimeError, match="holds something else where NCCL.s id should be"):
        ours.broadcast_obj(None, 0)
    ours.broadcast_obj("from us", 1)  # rank 1 of TRL >= 1.11 never does, rank 0 of a barrier of ours does
    assert trainer.broadcast_obj(None, 1) == "from us"


def test_a_trainer_that_masters_the_store_need_not_wait_for_more_than_the_server():
    """As vLLM makes it for the trainer of TRL >= 1.11: its constructor waits until two have counted themselves."""
    port, seconds = free_port(), timedelta(seconds=30)
    with ThreadPoolExecutor(1) as pool:
        options = {"is_master": True, "timeout": seconds, "use_libuv": False}
        trainer = pool.submit(dist.TCPStore, "127.0.0.1", port, 2, **options)
        ours, _ = _store(Meeting("127.0.0.1", port, 1, "cuda", 30.0))
        trainer.result(timeout=20).set("id", b"1")
        assert ours.get("id") == b"1"


OPENAI = {"messages": [{"role": "user", "content": "1"}], "return_token_ids": True}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    ("asked", "body", "says"),
    [
        (forms.completion_asked, {"prompt": [1], "echo": True}, "prompt_token_ids"),
        (forms.chat_asked, {**OPENAI, "tools": TOOLS, "tool_choice": "auto"}, "tool_choice='auto': calls of tools"),
        (forms.chat_asked, {**OPENAI, "tools": TOOLS, "tool_choice": "required"}, "tool_choice='required'"),
        (forms.chat_asked, {**OPENAI, "extra_args": {"a": 1}}, "extra_args: this server does not accept these"),
        (forms.completion_asked, {"prompt": [1], "thinking_token_budget": 3}, "thinking_token_budget: this server"),
        (forms.completion_asked, {"prompt": [1], "tempreature": 1}, "tempreature: this server does not accept these"),
    ],
)
def test_what_is_not_done_is_refused(asked, body, says):
    with pytest.raises(BadRequest, match=says):
        asked(body)


@pytest.mark.vllm
def test_every_sampling_parameter_that_is_passed_on_is_one_of_vllms():
    from vllm import SamplingParams

    assert set(SamplingParams.__struct_fields__) >= forms.SAMPLING


def test_what_changes_nothing_is_taken():
    plain = forms.chat_asked(OPENAI)
    for more in ({"echo": False, "tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}, {"extra_args": None}):
        assert forms.chat_asked(OPENAI | more) == plain


def test_a_conversation_is_rendered_as_a_request_says(checkpoint):
    texts = Texts(AutoTokenizer.from_pretrained(checkpoint))
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    go_on = {"add_generation_prompt": False, "continue_final_message": True}
    closed, begun, continued = (
        texts.render([talk], template_options({"messages": talk, **more}))[0]
        for more in ({"add_generation_prompt": False}, {}, go_on)
    )
    assert begun[: len(closed)] == closed and len(begun) > len(closed)
    assert closed[: len(continued)] == continued and len(continued) < len(closed)
    forms.chat_asked(OPENAI | go_on)
    with pytest.raises(BadRequest, match="add_generation_prompt must be true or false"):
        template_options({"add_generation_prompt": "no"})


def test_a_text_ends_before_the_stop_string_that_its_last_token_completed(checkpoint):
    """As vLLM's: the ids have it, the text does not. Of one that min_tokens has passed over nothing is cut."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts, ids = Texts(tokenizer), tokenizer("1+2+3+")["input_ids"]
    choice = {"token_ids": ids, "finish_reason": "stop", "stop_reason": "+"}
    assert texts.of(choice, {"stop": "+"}) == "1+2+3"
    assert texts.of(choice, {"stop": "+", "include_stop_str_in_output": True}) == "1+2+3+"
    assert texts.of(choice | {"stop_reason": ids[-1]}, {}) == texts.of(choice | {"stop_reason": None}, {}) == "1+2+3+"


# ---- who is there ----------------------------------------------------------------------------------------------------


def test_a_host_that_has_vanished_is_noticed():
    """Its socket is gone, and sent no FIN: without probes its connection would stay open."""

    async def seconds() -> float:
        made = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda reader, writer: made.set_result(writer), "127.0.0.1", 0)
        trainer = socket.create_connection(server.sockets[0].getsockname())
        connection = Connection((await made).transport)
        try:
            trainer.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR: closed without a word
        except PermissionError:
            pytest.skip("needs CAP_NET_ADMIN")
        trainer.close()
        began = time.monotonic()
        assert connection.open
        while connection.open and time.monotonic() - began < allowed(60):
            await asyncio.sleep(0.05)
        server.close()
        return time.monotonic() - began

    assert asyncio.run(seconds()) < 30
