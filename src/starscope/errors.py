"""One tree of exceptions. A message says what was found, what was expected and what to do.

Every class carries the exit status that the command line ends with and a short code for `--json`:

    raise InputError(f"{path} does not exist", hint="Check the path.")
"""

from __future__ import annotations

from typing import ClassVar


class StarscopeError(Exception):
    """The root of every error that starscope raises on purpose.

    `message` states what was found and what was expected; `hint`, when given, what to do next.
    """

    code: ClassVar[str] = "internal"
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class UsageError(StarscopeError):
    """An option or an argument that cannot be used as given."""

    code = "usage"
    exit_status = 2


class OutputExistsError(UsageError):
    """The output is already there and nobody said that it may be replaced."""

    code = "output_exists"

    def __init__(self, message: str, *, hint: str = "Use --force to replace it (from Python, force=True).") -> None:
        super().__init__(message, hint=hint)


class InputError(StarscopeError):
    """An input is missing or unreadable."""

    code = "input"
    exit_status = 3


class OutputError(StarscopeError):
    """An output cannot be written."""

    code = "output"
    exit_status = 3


class UnsupportedError(StarscopeError):
    """The content is valid, and starscope does not do it."""

    code = "unsupported"
    exit_status = 4


class InvalidContentError(StarscopeError):
    """The content contradicts itself or its format."""

    code = "invalid"
    exit_status = 4


class GGUFError(InvalidContentError):
    """A GGUF file that is not one, is cut, or lies about itself."""

    code = "invalid_gguf"


class CheckpointError(InvalidContentError):
    """A Hugging Face folder whose parts do not fit together."""

    code = "invalid_checkpoint"


class TokenizerError(InvalidContentError):
    """A vocabulary or a tokenizer file that cannot be used."""

    code = "invalid_tokenizer"


class ContextOverflowError(InvalidContentError):
    """More tokens than the model has positions."""

    code = "context_length_exceeded"


class DoesNotFitError(StarscopeError):
    """Too little memory or disk."""

    code = "does_not_fit"
    exit_status = 5


class OfflineError(StarscopeError):
    """Something has to be downloaded and the network is not there or not allowed."""

    code = "offline"
    exit_status = 6


class VerificationError(StarscopeError):
    """What was written differs from what should have been."""

    code = "verification"
    exit_status = 7


class TraceError(StarscopeError):
    """A value of the forward pass that was asked for, or changed, in a way that a trace cannot serve."""

    code = "trace"
    exit_status = 2


class OutsideTrace(TraceError, ValueError):  # noqa: N818  # the name that the field knows
    """A value was asked for while nothing runs that has it."""

    code = "outside_trace"


class OutOfOrder(TraceError):  # noqa: N818  # the name that the field knows
    """A value was asked for, or changed, after the run had passed the operations that use it."""

    code = "out_of_order"


OutOfOrderError = OutOfOrder


class Unavailable(TraceError, RuntimeError):  # noqa: N818  # the name that the field knows
    """A value that this run does not have."""

    code = "unavailable"


class Stopped(TraceError):  # noqa: N818  # the name that the field knows
    """A value was asked for after the trace had been stopped."""

    code = "stopped"


class ValueShapeError(TraceError, ValueError):
    """What was to replace a value has another shape or type."""

    code = "value_shape"
