"""Takes the current directory off the path of `python -m tilewise`, before anything is imported from there.

Python puts it in front of the standard library, so that a file `queue.py` of a folder one happens to be in would run.
Programs of others that import tilewise keep the path they have.

Invariant: imported first of all, this imports nothing but `sys`, which is built in: not even `__future__`.
"""

import sys

# `-m tilewise`, `-um tilewise` or `-mtilewise`.
STARTS_US = any(
    word[:1] == "-" and "m" in word and (word.partition("m")[2] or after).partition(".")[0] == __package__
    for word, after in zip(sys.orig_argv, [*sys.orig_argv[1:], ""], strict=True)
)
# While Python looks for the module to run, the program is named "-m".
if STARTS_US and sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
