"""What arguments of the loaders are called where a configuration gives them."""

ROOT = "`root` (on the command line `--data`)"
PATH = "`path` (on the command line `data.file`, below `--data`)"
OTHER_COUNTS = "pass check_counts=False (in a configuration `data.check_counts: false`)"
SKIP = 'pass on_error="skip" (in a configuration `data.unreadable: skip`)'
# Commands do not download data.
DOWNLOAD = "in Python pass download=True"
