"""Model families, one file each, and the registry that finds them by the name in a configuration."""
