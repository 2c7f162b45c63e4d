"""Other engines and this one in turn on the same prompts, on a CPU: one command, one table of ratios.

The parent installs each peer into an environment of its own (`install`), starts every engine as a process that speaks
a line-based protocol (`protocol`, `engine_*`), gives them turns (`turns`), and prints ratios (`table`).
Modules named `engine_*` and `protocol` run in the peers' environments: they import nothing of this project but
one another, and the engine that they are for.
"""
