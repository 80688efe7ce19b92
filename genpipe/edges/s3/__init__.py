"""A run in an object store: S3, or whatever speaks its language."""
