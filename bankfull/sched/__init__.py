"""Decides what the next step computes: admission, preemption, chunked prefill, fair shares. Never imports torch."""
