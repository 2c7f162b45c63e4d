"""The engine's process: started, supervised, fed and read by the API process."""
