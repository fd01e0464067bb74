"""The JSON bodies of requests to the server's port, and of its refusals."""

from __future__ import annotations

import json

from aiohttp import web

from instep.engines.bodies import body_of as read_body
from instep.engines.gate_main import MAX_BODY
from instep_neighbours.trl.forms import BadRequest, Body


async def body_of(http: web.Request) -> Body:
    raw = await read_body(http, MAX_BODY)
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
    return body


def object_of(body: Body, name: str) -> Body:
    value = body.get(name)
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object")
    return value


def error_answer(status: int, text: str) -> web.Response:
    reason = "".join(c if " " <= c <= "~" else " " for c in text)  # what requests' raise_for_status shows
    body = {"error": {"message": text, "type": "instep", "code": status}}
    return web.json_response(body, status=status, reason=reason[:1000])
