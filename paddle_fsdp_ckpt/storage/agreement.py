"""How ranks decide alike: each reports what it did or why it could not, rank 0 judges, all hear the same verdict.

Built on a key-value store rather than on collectives, so that a rank that died or hangs costs a time-out and not the job.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..errors import CheckpointError, RankFailedError, listing
from .json_values import JsonValue
from .system_errors import describe_error

_LOG = logging.getLogger("paddle_fsdp_ckpt")
_FIRST_WORD_SECONDS = 30.0
"""After how long a wait rank 0 says for whom it waits; it says so again after twice that, and so on."""

_PATIENCE_SECONDS = 60.0
"""How long ranks wait to hear that what they were given for it is no time."""

_NO_ANSWER = "no answer within {:g} s; it was killed, hangs, is slower than that, or never made this call, which all ranks must make"

COORDINATOR = 0
"""The rank that judges, and that alone makes, renames and removes directories."""


class Rendezvous(Protocol):
    """What the ranks of one job share: a store of bytes under names."""

    @property
    def rank(self) -> int:
        """This rank, from 0 on."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Set ``key``, which is not set yet."""
        ...

    def get(self, key: str, timeout_seconds: float) -> bytes:
        """Return what some rank put under ``key``, as soon as it is there; with a time-out of 0, look once.

        Raises:
            TimeoutError: it was not there in time.
        """
        ...

    def forget(self, key: str) -> None:
        """Free the memory of what was put under ``key``, which nobody will ask for again."""
        ...


def exchange(
    rendezvous: Rendezvous,
    token: str,
    produce: Callable[[], JsonValue],
    decide: Callable[[list[JsonValue]], JsonValue],
    timeout_seconds: float,
) -> JsonValue:
    """Let every rank do its part, and rank 0 make one result out of all parts; every rank returns it, or every rank raises.

    Args:
        rendezvous: the ranks that take part; all must call.
        token: unique for this exchange in the life of the job, the same on all ranks.
        produce: this rank's part.
        decide: called on rank 0 with all parts in the order of the ranks, once all have succeeded.
        timeout_seconds: how much later than rank 0 any rank may finish its part, and rank 0 than any other.

    Raises:
        RankFailedError: a part or the decision failed, or a rank did not answer in time; the message names every such rank. A
            rank whose own failure is another CheckpointError raises that instead.
    """
    is_number = _is_time(timeout_seconds)
    patience = timeout_seconds if is_number else _PATIENCE_SECONDS
    try:
        if not is_number:
            raise CheckpointError(
                f"timeout_seconds is {timeout_seconds!r:.100}, not a number of seconds above 0; float('inf') waits for ever"
            )
        part, failure = produce(), None
        encoded = json.dumps([part, None])  # what isn't JSON must be heard of too
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        part, failure = None, error
        encoded = json.dumps([None, _describe(error)])
    except BaseException as error:
        if rendezvous.rank == COORDINATOR:
            _put(rendezvous, f"{token}/verdict", json.dumps([None, _say({COORDINATOR: _describe(error)})]))
        else:
            _put(rendezvous, f"{token}/report/{rendezvous.rank}", json.dumps([None, _describe(error)]))
        raise
    if rendezvous.rank == COORDINATOR:
        result, text, decision_failure = _judge(rendezvous, token, part, failure, decide, patience)
        failure = failure or decision_failure
    else:
        _put(rendezvous, f"{token}/report/{rendezvous.rank}", encoded)
        result, text = _hear(rendezvous, token, patience)
    if text is None:
        return result
    if isinstance(failure, CheckpointError) and not isinstance(failure, RankFailedError):
        raise failure
    raise RankFailedError(text) from failure


def _is_time(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, (int, float, np.integer, np.floating)) and bool(value > 0)


def _judge(
    rendezvous: Rendezvous,
    token: str,
    part: JsonValue,
    failure: Exception | None,
    decide: Callable[[list[JsonValue]], JsonValue],
    timeout_seconds: float,
) -> tuple[JsonValue, str | None, Exception | None]:
    """Return the result, or the text of what failed and rank 0's own failure; all others hear it too."""
    try:
        parts, failures = _collect(rendezvous, token, part, failure, timeout_seconds)
        result, text, decision_failure = None, None, None
        if failures:
            text = _say(failures)
        else:
            try:
                result = decide(parts)
                verdict = json.dumps([result, None])  # what isn't JSON must be heard of too
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
                result, decision_failure = None, error
                text = str(error) if isinstance(error, RankFailedError) else _say({COORDINATOR: _describe(error)})
        if text is not None:
            verdict = json.dumps([None, text])
    except BaseException as error:
        _put(rendezvous, f"{token}/verdict", json.dumps([None, _say({COORDINATOR: _describe(error)})]))
        raise
    _put(rendezvous, f"{token}/verdict", verdict)
    return result, text, decision_failure


def _collect(
    rendezvous: Rendezvous, token: str, part: JsonValue, failure: Exception | None, timeout_seconds: float
) -> tuple[list[JsonValue], dict[int, str]]:
    """Return the parts of all ranks, and the failures of those that had one or did not answer."""
    parts: list[JsonValue] = []
    failures: dict[int, str] = {}
    wait = _Wait(rendezvous, token, timeout_seconds)
    for rank in range(rendezvous.world_size):
        if rank == COORDINATOR:
            value, text = part, None if failure is None else _describe(failure)
        else:
            try:
                value, text = json.loads(wait.report(rank))
            except TimeoutError:
                value, text = None, _NO_ANSWER.format(timeout_seconds)
            except Exception as error:  # noqa: BLE001 - each kind of store has its own exceptions
                value, text = None, f"its answer can't be read: {_describe(error)}"
        parts.append(value)
        if text is not None:
            failures[rank] = text
    return parts, failures


class _Wait:
    """How long rank 0 waits for the reports of the others, and when it says for whom."""

    def __init__(self, rendezvous: Rendezvous, token: str, timeout_seconds: float) -> None:
        self._rendezvous = rendezvous
        self._token = token
        self._start = time.monotonic()
        self._timeout = timeout_seconds
        self._next_word = _FIRST_WORD_SECONDS

    def report(self, rank: int) -> bytes:
        """Return what a rank reported.

        Raises:
            TimeoutError: nothing, until the time was over for all.
        """
        key = self._key(rank)
        while True:
            pause = min(self._timeout, self._next_word)
            try:
                report = self._rendezvous.get(key, max(0.0, pause - (time.monotonic() - self._start)))
            except TimeoutError:
                if pause == self._timeout:
                    raise
                self._say_for_whom(rank, pause)
                self._next_word *= 2
            else:
                self._rendezvous.forget(key)
                return report

    def _key(self, rank: int) -> str:
        return f"{self._token}/report/{rank}"

    def _say_for_whom(self, first: int, seconds: float) -> None:
        missing = [rank for rank in range(first, self._rendezvous.world_size) if not self._is_there(rank)]
        if missing:
            _LOG.warning(
                "rank %d has waited %g s for ranks %s (%s), and gives up after %g s; all ranks must make this call, without "
                "`if rank == 0`: see whether they do",
                COORDINATOR,
                seconds,
                listing(map(str, missing)),
                self._token,
                self._timeout,
            )

    def _is_there(self, rank: int) -> bool:
        try:
            self._rendezvous.get(self._key(rank), 0.0)
        except TimeoutError:
            return False
        return True


def _put(rendezvous: Rendezvous, key: str, encoded: str) -> None:
    try:
        rendezvous.put(key, encoded.encode())
    except Exception as error:
        raise RankFailedError(f"rank {rendezvous.rank} can't reach rank {COORDINATOR} and the others: {_describe(error)}") from error


def _hear(rendezvous: Rendezvous, token: str, timeout_seconds: float) -> tuple[JsonValue, str | None]:
    # Rank 0 may begin to collect a time-out later than this rank, and then waits another one for the slowest.
    patience = 2 * timeout_seconds
    try:
        result, text = json.loads(rendezvous.get(f"{token}/verdict", patience))
    except TimeoutError:
        return None, f"rank {COORDINATOR}, which coordinates, gave no verdict within {patience:g} s; it was killed or hangs"
    except Exception as error:  # noqa: BLE001 - each kind of store has its own exceptions
        return None, f"rank {COORDINATOR}, which coordinates, can't be reached: {_describe(error)}"
    return result, text


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else describe_error(error)


def _say(failures: dict[int, str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {listing(map(str, ranks))} failed: {text}" for text, ranks in ranks_of.items())
