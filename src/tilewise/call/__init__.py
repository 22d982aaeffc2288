"""From a call to the kernels that run it.

request.py   what was asked: a form, tensors by slot, and one record of options
resolve.py   a Request as a Problem with its operands
build.py     a Problem as a Call: planned, built and bound
memory.py    which Call a Request had before
execute.py   a Call run on the tensors of a Request
native.py    repeated calls, handed over to the native extension
"""
