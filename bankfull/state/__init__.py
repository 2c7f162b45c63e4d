"""What a sequence keeps between steps: the page pool, the prefix cache and recurrent slots."""
