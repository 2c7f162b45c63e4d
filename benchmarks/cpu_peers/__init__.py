"""Other engines and this one in turn on the same prompts, on a CPU: one command, a table of ratios for each peer.

The parent installs each peer into an environment of its own (`install`, `peers`), makes the files that the two sides
run (`models`, `shapes`), starts every engine as a process that speaks a line-based protocol (`process`, `protocol`,
`engine_*`), gives them turns (`compare`, `turns`), and prints ratios. What `bankfull bench compare` does too lies in
`bankfull.limits.load`: rows and their table, turns, groups of processes.
Modules named `engine_*` and `protocol` run in the peers' environments: they import nothing of this project but
one another, and the engine that they are for.
"""
