"""The Batch API: files, batches, and the runner that works through their lines."""
