"""The service: HTTP APIs in one process, the engine in another.

`wire` is what the two say to each other; `backend` is all that an endpoint knows of the engine; `events` is what an
answer means before an API spells it.
"""
