"""The Batch API: files, batches, and the runner that executes their lines."""
