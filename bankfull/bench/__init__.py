"""`bankfull bench`: the speed of a model or a server next to the limit of the machine.

`offline` measures an engine in this process; `load` is an open-loop client for servers; `compare` measures several
engines alternately; `report` renders the results of `load`.
"""
