"""The float64 oracle, the verdict on an output, and the cases that break kernels."""
