"""Load from outside: an open-loop client for any OpenAI-compatible server, and what its times say.

`arrivals` decide when each conversation begins, before anything runs; `workloads` decide what is asked. The `client`
keeps to that timetable whatever the server does, so that a server that falls behind cannot slow down those who ask it:
latency counts from the intended start. When bytes came is the kernel's word (`stamped`), not the reader's. `measures`
turns times into figures, `limit` puts the hardware's limit beside them, `report_*` writes them down; `sweep` and
`compare` run the same many times. Nothing here imports torch unless a limit is asked for.
"""
