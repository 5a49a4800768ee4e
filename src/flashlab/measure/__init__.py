"""Times, rates and profiles on a GPU, taken in a worker process and written as records."""
