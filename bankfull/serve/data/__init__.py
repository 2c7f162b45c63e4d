"""What must survive a crash: the database, the stored files, and `bankfull data` for their upkeep."""
