"""The experiments' commands: a module an experiment, with `COMMANDS`, functions by the command's name.

`flashlab.cli` imports every module here when it starts, so each imports its experiment inside its functions.
"""
