"""Physical limits: what a machine can do, what a model costs, and where the time of a request went.

`machine` holds measured and catalogued ceilings, `meter` counts the bytes and operations of a step, `model` bounds a
model without its weights, `explain` compares a run with its limit, `charts` draws.
"""
