"""Durable data: the database, the stored files, and their maintenance (`bankfull data`)."""
