"""Load testing: an open-loop client for any OpenAI-compatible server.

`traffic.arrivals` decides when each conversation begins and `workloads` what it asks, both before the run. `client`
keeps to that schedule whatever the server does, so that a slow server cannot reduce its own load; latency counts from
the intended start. Arrival times of bytes are kernel timestamps (`stamped`), not read times. `measures` computes
latency percentiles, throughput and goodput; `utilization` and `request_limits` compare them with the hardware's limit;
`sweep` searches the highest sustainable rate. Nothing here imports torch unless a limit is requested.
"""
