"""Kernel source to machine code on any machine, and what the machine code says."""
