"""What is written down: the schema, the header every record carries, and the append-only files."""
