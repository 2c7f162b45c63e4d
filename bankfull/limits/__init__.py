"""Physical limits: what a machine can do, what a model costs, and where the time of a request went.

| command | module |
|---|---|
| `bankfull limits` | `machine`: measured and catalogued ceilings |
| `bankfull info`, `roofline` | `model`: what a model needs, and what bounds it on a machine, without its weights |
| `bankfull explain` | `explain`: a run compared with its limit |
| `bankfull tune` | `tune`: the fastest kernel configuration for each linear layer |

`meter` counts the bytes and operations of a step.
"""
