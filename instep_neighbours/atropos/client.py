"""The trainer's side of an Atropos API: it registers, requests batches, and limits every wait.

The API removes a batch when it answers. A batch in a lost answer is lost, and no batch is given twice. So a request for
a batch is not repeated if the API is slow or hangs: it waits for the whole time limit, and reports it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict
from typing import Any

import aiohttp

from instep.errors import EngineError, RolloutError
from instep.rollout.runtime import CONNECT_SECONDS, http_session
from instep_neighbours.atropos.batches import Registration
from instep_neighbours.atropos.groups import size_of

logger = logging.getLogger(__name__)

FIRST_CONTACT = 10.0  # seconds until an API must give its first answer
ASK_SECONDS = 30.0  # for an answer other than a batch
TELL_AFTER = 10.0  # seconds until the user gets a report on the wait
LONGEST_PAUSE = 1.0  # between two requests for a batch, as in Atropos' trainer
_START = "start it (`instep env-api`, or Atropos' `run-api`), or name its address with --atropos-url"


class _Down(Exception):
    """The API cannot answer now, or has lost its state."""


class ApiClient:
    """One API, of one run.

    Args:
        url: http://HOST:PORT.

    Attributes:
        reported: reports that were given once.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.reported: set[str] = set()
        self._reached = self._registered = False
        self._down_since: float | None = None

    async def next_batch(self, registration: Registration, timeout: float) -> list[dict[str, Any]]:
        """Return the groups of one batch: exactly `registration.batch_size` sequences.

        It registers the trainer if the API has none: at the first call, and after a restart of the API.

        Raises:
            EngineError: the API does not answer within `timeout` seconds (the first time: 10), or is not an Atropos
                API.
            RolloutError: no batch came within `timeout` seconds, or a batch has another size.
        """
        begun, pause, reported = time.monotonic(), 0.05, False
        while True:
            asked = time.monotonic()
            try:
                if not self._registered:
                    await self._register(registration)
                batch = await self._ask("GET", "/batch", timeout=timeout)
                if batch.get("status") == "error":
                    raise _Down(str(batch.get("message")))
            except _Down as problem:
                self._is_down(problem, timeout, asked)
            else:
                if self._down_since is not None:
                    logger.warning("the Atropos API at %s answers again; start environments again that ended", self.url)
                self._down_since, waited = None, time.monotonic() - begun
                if batch.get("batch"):
                    return self._checked(batch["batch"], registration)
                if waited > timeout:
                    await self._no_batch(registration, timeout)
                if waited > TELL_AFTER and not reported:
                    reported, situation = True, (await self._situation())[1]
                    what = "no batch of %d sequences has come for %.0f s from the Atropos API at %s: %s; %.0f s left"
                    logger.warning(what, registration.batch_size, waited, self.url, situation, timeout - waited)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def give_back(self, groups: list[dict[str, Any]]) -> None:
        """Put groups of a batch back into the API's queue. If the API is down, they are lost, like its queue."""
        if groups:
            try:
                await self._ask("POST", "/scored_data_list", groups)
            except _Down as problem:
                what = "%d groups are lost, which the Atropos API at %s should take back: %s"
                logger.warning(what, len(groups), self.url, problem)

    async def _situation(self) -> tuple[int, str]:
        """Return the number of waiting groups in the API and its environments, as text."""
        found: list[dict[str, Any]] = []
        for path in ("/status", "/environments"):  # only instep's API has the latter
            try:
                found.append(await self._ask("GET", path))
            except (_Down, EngineError):
                found.append({})
        size, envs = found[0].get("queue_size") or 0, found[1].get("environments")
        words = [f"{size} groups wait in the API" if size else "no group waits in the API"]
        for env in envs or []:
            words.append(
                f"environment {env['env_id']} ({env['name']}) sent its last request {env['seconds_since_heard']} s ago"
            )
        return size, "; ".join(words + (["no environment has registered"] if envs == [] else []))

    # ---- one question ----------------------------------------------------------------------------------------------

    async def _register(self, registration: Registration) -> None:
        answer = await self._ask("POST", "/register", asdict(registration))
        if "uuid" not in answer:
            raise self._no_api(f"POST /register answered {answer!r:.200}")
        known = (await self._ask("GET", "/info")).get("batch_size")
        if known != registration.batch_size:
            raise RolloutError(
                f"the Atropos API cuts batches of {known} sequences, as the first registered trainer requested, but a "
                f"rollout of this run has {registration.batch_size}",
                where=self.url,
                remedy=f"start the API again, or remove that run with `curl {self.url}/reset_data`; or choose "
                "--rollout-batch-size x --n-samples-per-prompt to be that many",
            )
        self._registered = True
        logger.info("registered with the Atropos API at %s", self.url)

    async def _ask(self, method: str, path: str, body: Any = None, *, timeout: float = ASK_SECONDS) -> dict[str, Any]:
        timeout = timeout if self._reached else min(timeout, FIRST_CONTACT)
        limits, sent = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS), False
        what = f"has not answered {path} for {TELL_AFTER:.0f} s; it has {timeout:.0f} s in all"
        tell = asyncio.get_running_loop().call_later(TELL_AFTER, logger.warning, "the API at %s %s", self.url, what)
        try:
            async with (
                http_session() as session,
                session.request(method, self.url + path, json=body, timeout=limits) as answer,
            ):
                sent = True
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if sent and path == "/batch":
                logger.warning("the answer of %s%s was interrupted (%r): its batch is lost", self.url, path, error)
            raise _Down(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        finally:
            tell.cancel()
        if answer.status >= 500:
            raise _Down(f"{path} answered {answer.status}")
        if answer.status >= 400:
            raise self._no_api(f"{method} {path} answered {answer.status}: {text[:200]}")
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self._no_api(f"{method} {path} answered {text[:200]!r}")
        self._reached = True
        return value

    # ---- what is said ----------------------------------------------------------------------------------------------

    def _no_api(self, what: str) -> EngineError:
        return EngineError(
            f"this is not an Atropos API: {what}", where=self.url, remedy="--atropos-url names its address"
        )

    def _is_down(self, problem: _Down, timeout: float, asked: float) -> None:
        """Count how long the API is down; `asked` got no answer. Raises EngineError if it is down too long."""
        first, self._registered = self._down_since is None, False
        self._down_since = asked if self._down_since is None else self._down_since
        bound = timeout if self._reached else min(timeout, FIRST_CONTACT)
        if (seconds := time.monotonic() - self._down_since) >= bound:
            what = f"the Atropos API has not answered for {seconds:.0f} s: {problem}"
            raise EngineError(what, where=self.url, remedy=_START)
        if first and self._reached:
            what = "the Atropos API at %s does not answer any more (%s); new attempts for at most %.0f s"
            logger.warning(what, self.url, problem, timeout)

    def _checked(self, batch: Any, registration: Registration) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = batch if isinstance(batch, list) else []
        if not groups or not all(isinstance(g, dict) and isinstance(g.get("tokens"), list) for g in groups):
            raise self._no_api(f"GET /batch answered groups without tokens: {batch!r:.200}")
        if (size := sum(map(size_of, groups))) != registration.batch_size:
            self._registered = False
            what = f"the Atropos API gave a batch of {size} sequences, not of {registration.batch_size}"
            remedy = "another trainer has registered with it: one API feeds one run"
            raise RolloutError(what, where=self.url, remedy=remedy)
        return groups

    async def _no_batch(self, registration: Registration, timeout: float) -> None:
        size, situation = await self._situation()
        remedy = f"start an environment with `--env.rollout_server_url {self.url}`, or see the log of the running one"
        if size:
            remedy = (
                "groups are packed to the size of the largest one, which must divide the batch, and an environment "
                "with a min_batch_allocation must have its share there"
            )
        what = f"no batch of {registration.batch_size} sequences came within {timeout:.0f} s: {situation}"
        raise RolloutError(what, where=self.url, remedy=f"{remedy}; --atropos-timeout is the limit")
