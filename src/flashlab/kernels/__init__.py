"""The registry: every stage, dead end and lever, read from data."""
