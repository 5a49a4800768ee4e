"""Exceptions raised by flashlab.

    FlashlabError
    ├── InputError (ValueError)      invalid arguments
    │   ├── ShapeError                   shapes mismatched, empty or out of range
    │   ├── DTypeError                   unsupported or mixed data types
    │   ├── LayoutError                  unsupported strides, alignment or memory overlap
    │   ├── DeviceError                  arrays on different devices or the wrong kind of device
    │   ├── UnknownStageError            no stage has that id
    │   └── ParameterError               unknown or invalid tunable, option or notebook parameter
    ├── UnsupportedError             valid input that the stage or this GPU does not support
    │   └── TooLargeError                emulation would exceed its time limit
    ├── MissingError                 a component missing on this machine
    │   ├── NoGpuError                   no CUDA GPU or no driver
    │   └── MissingPackageError          a Python package or program that is not installed
    ├── CompileError                 NVRTC, ptxas or the C++ compiler rejected the source
    │   └── PerformanceWarningError      compiled with a warning that costs performance
    ├── LaunchError                  the driver rejected or aborted a launch
    ├── EmulationError               a kernel emulated on the CPU did not finish
    ├── CheckFailedError             a result was rejected by the oracle
    ├── DataError                    recorded data is missing or damaged
    │   ├── NoDataError                  nothing recorded for that GPU, shape or run
    │   └── DamagedRecordError           invalid record line, or a file that does not match CHECKSUMS
    ├── OutputError                  a folder or file is not writable
    └── ReportError                  a notebook did not finish, or the site did not build

A message states what was wanted, what was got, and what works.
"""

from __future__ import annotations

import copyreg
from collections.abc import Collection
from typing import Any


class FlashlabError(Exception):
    """Base class of all flashlab exceptions."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and unpickle without `__init__`, which may require keyword arguments."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class InputError(FlashlabError, ValueError):
    """Invalid arguments."""


class ShapeError(InputError):
    """Shapes are mismatched, empty or out of range."""


class DTypeError(InputError):
    """Unsupported data type, or arrays of mixed data types."""


class LayoutError(InputError):
    """Unsupported strides or alignment, read-only output, or overlapping memory."""


class DeviceError(InputError):
    """Arrays on different devices, or on the wrong kind of device."""


class UnknownStageError(InputError):
    """No stage has that id."""


class ParameterError(InputError):
    """Unknown or invalid tunable, option or notebook parameter."""


def refuse_unknown(what: str, known: Collection[Any], *values: Any) -> None:
    """Raise `ParameterError` for the first of `values` that is not in `known`, listing the known ones."""
    for value in values:
        if value not in known:
            raise ParameterError(f"{what}: wanted one of {', '.join(known) or 'none'}, got {value!r}")


class UnsupportedError(FlashlabError):
    """Valid input that the stage or this GPU does not support."""


class TooLargeError(UnsupportedError):
    """Emulation on the CPU would exceed its time limit.

    Attributes:
        seconds: estimated run time, in seconds.
    """

    def __init__(self, message: str, *, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class MissingError(FlashlabError):
    """A component that flashlab needs is missing on this machine."""


class NoGpuError(MissingError):
    """No CUDA GPU, or no driver for it."""


class MissingPackageError(MissingError):
    """A Python package or program is not installed; the message names the command that installs it."""


class CompileError(FlashlabError):
    """NVRTC, ptxas or, for a run on the CPU, the C++ compiler rejected the source.

    Attributes:
        summary: the error and its source line, if known; `str(error)` adds the command and log.
        command: the equivalent command line.
        log: the complete compiler log.
        source_line: `file:line: text` of the first error, or None if the log names none.
    """

    def __init__(self, message: str, *, command: str, log: str, source_line: str | None = None) -> None:
        self.summary = f"{message}\n  {source_line}" if source_line else message
        super().__init__(
            f"{self.summary}\nEquivalent command: {command}\nLog:\n{log or '(empty)'}" if command else self.summary
        )
        self.command = command
        self.log = log
        self.source_line = source_line


class PerformanceWarningError(CompileError):
    """Compiled with a warning that costs performance: spills, serialised wgmma, or ignored setmaxnreg."""


class LaunchError(FlashlabError):
    """The driver rejected or aborted a launch."""


class EmulationError(FlashlabError):
    """A kernel emulated on the CPU deadlocked, crashed, executed an invalid operation or timed out.

    Attributes:
        report: the `emulator.Report` so far; None if the worker process sent none.
    """

    def __init__(self, message: str, *, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class CheckFailedError(FlashlabError):
    """A result was rejected by the oracle."""


class DataError(FlashlabError):
    """Recorded data is missing or damaged."""


class NoDataError(DataError):
    """Nothing is recorded for that GPU, shape or run."""

    @classmethod
    def of(cls, wanted: str, command: str, found: object = "none") -> NoDataError:
        """Build the error for missing records, naming the command that makes some."""
        return cls(f"wanted {wanted}, found {found}. `{command}` makes some")


class DamagedRecordError(DataError):
    """A line is not a valid record, or a file does not match CHECKSUMS."""


class OutputError(FlashlabError):
    """A folder or file is not writable."""


class ReportError(FlashlabError):
    """A notebook did not finish, or the site did not build."""
