"""Wrong implementations that the checker must reject, each for the right reason.

simulation.py   a tile-by-tile online softmax in NumPy, right as it stands, with one fault on request
catalogue.py    WRONG: every fault with the problem that shows it and the reason the checker must give
cuda.py         PATCHES: the same kinds of fault as edits of a real kernel's source, for tests on a GPU
"""
