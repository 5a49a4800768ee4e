"""Attention on a GPU or emulated on a CPU: which stage a problem gets, and how it is launched."""
