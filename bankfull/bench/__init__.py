"""`bankfull bench`: how fast a model or a server is, beside what the machine could do.

`offline` measures an engine in this process; `load` is an open-loop client for servers; `compare` runs two engines in
turn; `report` writes down what was measured.
"""
