"""Answers that are given again: the response cache (`--response-cache`)."""
