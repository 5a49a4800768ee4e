"""Shared foundations: errors, problems, input kinds and paths. Imports no other flashlab package."""
