"""Training of drafters for a frozen model: data that the model writes itself, hidden states, loop, checkpoints, report.

A kind of drafter is one file with a `Trainer` (`trainer.py`); everything else here serves all kinds.
"""
