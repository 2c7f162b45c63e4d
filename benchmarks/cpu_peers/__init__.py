"""Compares this engine with others on a CPU, alternately on the same work: one command, one table of ratios per peer.

llama.cpp runs with its own tools (`llamacpp`, built by `llamacpp_build`), one process per turn. An engine that loads
slowly gets its own environment (`install`) and stays loaded, as a process with a line-based protocol (`process`,
`protocol`, `engine_*`); so does this engine. The parent creates the model files (`models`, `shapes`), runs the turns
(`contenders`, `turns`, `compare`), and prints ratios; `fairness` checks a peer's figures against its own tool (`tool`,
`vllm_bench`). Code shared with `bankfull bench compare` is in `bankfull.bench.compare`: rows, tables, turns, process
groups. Modules named `engine_*` and `protocol` run in the peers' environments: they import nothing of this project but
one another, and their engine.
"""
