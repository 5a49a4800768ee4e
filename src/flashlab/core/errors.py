"""Every error flashlab raises on purpose.

    FlashlabError
    ├── InputError (ValueError)      the caller's arguments are off
    │   ├── ShapeError                   shapes disagree, are empty or out of range
    │   ├── DTypeError                   an element type no stage takes, or mixed types
    │   ├── LayoutError                  strides or alignment a kernel cannot read
    │   ├── DeviceError                  tensors on different devices, or on the wrong kind of device
    │   ├── UnknownStageError            no stage of that id
    │   └── ParameterError               a tunable, option or notebook parameter that does not exist or does not fit
    ├── UnsupportedError             the stage exists and the input is sound, but not together, or not on this GPU
    │   └── TooLargeError                it would take a CPU longer than allowed
    ├── MissingError                 something this machine lacks
    │   ├── NoGpuError                   no CUDA GPU or no driver
    │   └── MissingPackageError          a Python package or program that is not installed
    ├── CompileError                 NVRTC, ptxas or the C++ compiler refused the source
    │   └── PerformanceWarningError      it compiled, with a warning that means lost performance
    ├── LaunchError                  the driver refused or broke off a launch
    ├── EmulationError               a kernel that ran on the CPU did not come to its end
    ├── CheckFailedError             a result that the oracle rejects
    ├── DataError                    committed data is missing or damaged
    │   ├── NoDataError                  nothing recorded for that GPU, shape or run
    │   └── DamagedRecordError           a line that is not a record, or a file that is not what CHECKSUMS says
    ├── OutputError                  a folder or file that cannot be written
    └── ReportError                  a notebook did not finish, or the site did not build

A message says what was wanted, what came, and what works.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class FlashlabError(Exception):
    """The root: catching it catches everything flashlab raises on purpose."""


class InputError(FlashlabError, ValueError):
    """The caller's arguments are off."""


class ShapeError(InputError):
    """Shapes disagree, are empty, or are out of a stage's range."""


class DTypeError(InputError):
    """An element type that no stage takes, or tensors of mixed types."""


class LayoutError(InputError):
    """Strides or alignment that a kernel cannot read."""


class DeviceError(InputError):
    """Tensors on different devices, or on the wrong kind of device."""


class UnknownStageError(InputError):
    """No stage has that id."""


class ParameterError(InputError):
    """A tunable, option or notebook parameter that does not exist or does not fit."""


def refuse_unknown(what: str, known: Collection[Any], *values: Any) -> None:
    """Raises `ParameterError` where one of the values is none of those that are known, which it names."""
    for value in values:
        if value not in known:
            raise ParameterError(f"{what}: wanted one of {', '.join(known) or 'none'}, got {value!r}")


class UnsupportedError(FlashlabError):
    """The stage exists and the input is sound, but not together, or not on this GPU."""


class TooLargeError(UnsupportedError):
    """A CPU would take longer over it than allowed.

    Attributes:
        seconds: about how long it would take.
    """

    def __init__(self, message: str, *, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class MissingError(FlashlabError):
    """Something this machine lacks."""


class NoGpuError(MissingError):
    """No CUDA GPU, or no driver for it."""


class MissingPackageError(MissingError):
    """A Python package or program that is not installed; the message has the command that installs it."""


class CompileError(FlashlabError):
    """NVRTC, ptxas or, for a run on the CPU, the C++ compiler refused the source.

    Attributes:
        summary: what was refused, and the line of source where one is known; the whole text has command and log too.
        command: the equivalent command line.
        log: the compiler's whole log.
        source_line: `file:line: text` of the first error, or None where the log names none.
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
    """It compiled, with a warning that means lost performance: spills, serialised wgmma, dropped setmaxnreg."""


class LaunchError(FlashlabError):
    """The driver refused a launch or broke it off."""


class EmulationError(FlashlabError):
    """A kernel that ran on the CPU deadlocked, crashed, misused the machine or took too long.

    Attributes:
        report: how far it came, `emulator.Report`; None where the worker process said nothing.
    """

    def __init__(self, message: str, *, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class CheckFailedError(FlashlabError):
    """A result that the oracle rejects."""


class DataError(FlashlabError):
    """Committed data is missing or damaged."""


class NoDataError(DataError):
    """Nothing is recorded for that GPU, shape or run."""

    @classmethod
    def of(cls, wanted: str, command: str, found: object = "none") -> NoDataError:
        """That what is wanted is not on record, with the command that makes some."""
        return cls(f"wanted {wanted}, found {found}. `{command}` makes some")


class DamagedRecordError(DataError):
    """A line that is not a record, or a file that is not what CHECKSUMS says."""


class OutputError(FlashlabError):
    """A folder or file that cannot be written."""


class ReportError(FlashlabError):
    """A notebook did not finish, or the site did not build."""
