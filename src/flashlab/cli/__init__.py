"""The command-line interface, one module per group of commands."""

from flashlab.cli.app import main as main
