"""The bodies: what each operation means, in torch."""
