"""The result of a load test as text, JSON, HTML and charts."""
