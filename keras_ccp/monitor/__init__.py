"""Pictures and numbers of a training while it runs."""
