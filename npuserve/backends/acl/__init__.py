"""A thin, typed, leak-proof wrapper of pyACL; `om` and `ge` are written on it.

    codes.py    numbers of the runtime: return codes, dtypes, formats, copy directions
    library.py  finding `acl`, checking every return code, acl.init once per process
    runtime.py  context, stream, event
    memory.py   device and page-locked buffers
    model.py    loaded model, its description, datasets
    gears.py    which gear fits a request; pure
    runner.py   one loaded model with its streams and staging slots: submit, collect

Every class that owns something of the runtime is a context manager with an idempotent `close`.
Nothing here schedules, and nothing knows a request.
"""
