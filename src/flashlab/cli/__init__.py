"""The command line, a file for each group of commands."""

from flashlab.cli.app import main as main
