"""HTTP APIs: schemas, requests from calls, and answers as JSON or server-sent events."""
