"""Charts, tables, the site and what the notebooks import."""
