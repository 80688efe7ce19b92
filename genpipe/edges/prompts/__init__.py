"""Prompts: files of any kind, where their records begin and end, and what the records ask."""
