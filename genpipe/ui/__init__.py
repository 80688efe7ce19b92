"""Views of a run: all of them read the snapshot that stands in ``progress.json``."""
