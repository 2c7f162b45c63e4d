"""HTTP APIs: schemas, how calls become requests, how answers become JSON or server-sent events."""
