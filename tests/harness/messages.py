"""What the tests and their ranks say to each other; all of it is plain data that pickles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHECK = "check"
"""Sent instead of a :class:`Job`: are all ranks still at the same collective?"""


@dataclass(frozen=True)
class Job:
    """A call that every rank makes.

    Attributes:
        module: name of the module that holds the function.
        function: the function's qualified name in it.
        args: its arguments, pickled by themselves so that a rank can report that it can't read them.
        import_path: the tests' ``sys.path``, for the module to be found.
    """

    module: str
    function: str
    args: bytes
    import_path: tuple[str, ...]


@dataclass(frozen=True)
class RankError:
    """An exception that a rank raised, as text: the exception itself may not pickle.

    Attributes:
        type: name of its class, e.g. ``"MismatchError"``.
        message: ``str()`` of it.
        bases: names of all classes that it is an instance of, its own included.
        traceback: as Python prints it, with the plain local variables of the last frame.
    """

    type: str
    message: str
    bases: tuple[str, ...]
    traceback: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"

    def __eq__(self, other: object) -> bool:
        """Compare class and message: where it was raised may differ between ranks that report the same error."""
        return isinstance(other, RankError) and (self.type, self.message) == (other.type, other.message)

    def __hash__(self) -> int:
        return hash((self.type, self.message))


@dataclass(frozen=True)
class Outcome:
    """How a run ended on one rank: with a value, an exception, or the end of its process.

    Attributes:
        value: what the function returned.
        error: what it raised, if it did.
        exit_code: the exit status of the process, negative for a signal; None while it lives.
    """

    value: Any = None
    error: RankError | None = None
    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exit_code is None

    def __str__(self) -> str:
        if self.exit_code is not None:
            return f"its process ended with exit status {self.exit_code}"
        return "returned" if self.error is None else f"raised {self.error}"
