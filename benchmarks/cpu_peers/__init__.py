"""Other engines and this one in turn on the same work, on a CPU: one command, a table of ratios for each peer.

Each peer gets what its own tool gives it. llama.cpp runs by its own tools (`llamacpp`, built by `llamacpp_build`), a
process per turn. An engine that takes long to load gets an environment of its own (`install`) and stays loaded, as a
process that speaks a line-based protocol (`process`, `protocol`, `engine_*`); so does this engine. The parent makes the
files that the two sides run (`models`, `shapes`), gives them turns (`contenders`, `turns`, `compare`), and prints
ratios; `fairness` holds a peer's turns beside its own tool (`tool`, `vllm_bench`). What `bankfull bench compare` does
too lies in `bankfull.bench.load`: rows and their table, turns, groups of processes.
Modules named `engine_*` and `protocol` run in the peers' environments: they import nothing of this project but
one another, and the engine that they are for.
"""
