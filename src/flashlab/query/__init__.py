"""Records to one frame, one rule that selects rows, and the statistics over them. Never compiles, runs or measures."""
