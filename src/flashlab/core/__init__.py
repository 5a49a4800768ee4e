"""What everything shares: errors, the problem, its inputs, and where things are. Imports nothing of flashlab."""
