"""One rule that selects among records, and the statistics over what it selects. Never compiles, runs or measures."""
