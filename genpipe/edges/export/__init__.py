"""The records of a run as training data: gathered, put in order, and written in the form that is wished."""
