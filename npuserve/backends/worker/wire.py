"""The messages between the server and a worker process; pure.

One message is one datagram of a SOCK_SEQPACKET socket: a marshalled tuple
`(kind, memory, payload)`. marshal is the fastest codec Python has for small plain values and, at
version 2, the same in every Python 3; both ends are ours, so its lack of a schema is made up for
by the table below and by `unpack`, which refuses everything else.

`memory` is None or the bookkeeping of shared memory that rides on the message, see `shm.py`:
`(released tokens, announced blocks as (id, size), forgotten block ids)`.

Values:
    tensor    (name, datatype code, shape, data): data is bytes, or a reference to shared memory
              (token, block id, offset, length)
    response  (tensors, parameters as JSON or None, error)
    error     None or (status code index, text)
    request   (tensors, None), or (tensors, (id, correlation id, flags, timeout in µs, priority,
              parameters as JSON or None, requested output names, trace context as JSON or
              None)); in INFER the last one is the key of the request whose trace it continues
    key       (batch id, index of the request in its batch)

Runs in every interpreter a worker may have: standard library only.
"""

from __future__ import annotations

import marshal
import operator
from typing import TYPE_CHECKING, Any

# server → worker                   payload
EXECUTE = 1  #                      (batch id, requests)
CANCEL = 2  #                       key
ANSWER = 3  #                       (call id, ok, value or error text)
INFER_RESPONSE = 4  #               (call id, response or None, final)
STOP = 5  #                         None
INIT = 6  #                         what the worker shall be, as a dict
IS_READY = 7  #                     None; asks the model, answered by READINESS
HOLD = 8  #                         whether to hold large responses back
LOOK = 9  #                         None; what batches wait for, answered by WAITS
# worker → server
READY = 16  #                       facts as a dict
FAILED = 17  #                      error
RESULT = 18  #                      (batch id, input ready ns, output ready ns, outcomes, error)
RESPONSES = 19  #                   [(key, response or None, final)]
CALL = 20  #                        (call id, method, arguments); call id 0 wants no answer
INFER = 21  #                       (call id, model name, version, request, decoupled)
INFER_CANCEL = 22  #                call id
LOG = 23  #                         (level, text, file, line)
STOPPED = 24  #                     None
READINESS = 25  #                   (whether it is ready, error)
WAITS = 26  #                       (batches, senders, others) as in `call_graph.Report`
# worker → a process that its model forked, besides ANSWER and INFER_RESPONSE
REFUSED = 27  #                     (call id, error text)
# forked process → worker, besides CALL, INFER, INFER_CANCEL and LOG
CONNECT = 28  #                     number of the port; with the descriptor of a channel
WAITING = 29  #                     (call id, responses taken): the whole process waits for more
# both
MEMORY = 30  #                      None: only `memory` matters
SPILLED = 31  #                     reference to shared memory that holds the message proper
# server → fork server
FORK = 40  #                        token; with the descriptors of the channel and of the output
KILL = 41  #                        process id
# fork server → server
FORKED = 42  #                      (token, process id); token 0 once, when it is ready
EXITED = 43  #                      (process id, wait status)

KINDS = frozenset({*range(1, 10), *range(16, 32), *range(40, 44)})

# Outcomes of one request in RESULT that are not a response.
LATER = None  # answered, or going to be answered, through its response sender
RESCHEDULE = 1

DATATYPES = (
    "", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BYTES", "BF16",
)  # fmt: skip
"""Wire datatypes; the index is the code, which is that of ModelConfig's DataType."""

CODE_OF = {name: code for code, name in enumerate(DATATYPES)}

STATUS_NAMES = (
    "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARGUMENT", "UNAVAILABLE", "UNSUPPORTED",
    "ALREADY_EXISTS", "CANCELLED",
)  # fmt: skip
"""Names of the status codes; the index is what an error carries."""

# A longer message goes through shared memory: a datagram must fit the socket's send buffer.
MAX_DATAGRAM_BYTES = 64 * 1024

# Tensors below this size travel inside the message; shared memory would cost more than the copy.
INLINE_BYTES = 32 * 1024

# Most file descriptors (announced blocks) one message carries; Linux allows 253.
MAX_FDS = 64

_MARSHAL_VERSION = 2  # without references: faster, and read by every Python 3

# How marshal begins a tuple of three. It believes every length it reads, so that bytes of something
# else would make it reserve gigabytes before it finds them wrong.
_BEGINNING = b"(\x03\0\0\0"

if TYPE_CHECKING:  # Python 3.8 has no such types
    Message = tuple[int, Any, Any]


class WireError(Exception):
    """The peer sent something that is no message."""


def pack(kind: int, memory: Any, payload: Any) -> bytes:
    """One message as bytes. Buffers (memoryview, contiguous array) are written as bytes."""
    return marshal.dumps((kind, memory, payload), _MARSHAL_VERSION)


def text(value: Any, what: str) -> str:
    """A model's argument as a str of exactly that type: marshal writes numpy.str_ as bytes.

    Raises:
        TypeError: it is none.
    """
    if type(value) is str:
        return value
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(
            f"incompatible function arguments: {what} must be a str, got {type(value).__name__}"
        )
    return str.__str__(value)


def integer(value: Any, what: str, lowest: int, highest: int) -> int:
    """A model's argument as an int of exactly that type: marshal writes numpy.int64 as bytes.

    Raises:
        TypeError: it is none, or beyond the limits.
    """
    number = int(operator.index(value)) if hasattr(value, "__index__") else None
    if number is None or not lowest <= number <= highest:
        raise TypeError(
            f"incompatible function arguments: {what} must be an integer from {lowest} to "
            f"{highest}, got {value!r}"
        )
    return number


def unpack(data: Any) -> Message:
    """The message in `data`.

    Raises:
        WireError: it is not one.
    """
    try:
        if data[: len(_BEGINNING)] == _BEGINNING:
            message = marshal.loads(data)
            if message[0] in KINDS:
                return message  # type: ignore[no-any-return]
    except (ValueError, EOFError, TypeError, KeyError, MemoryError):
        pass  # marshal raises any of these for bytes that are not its own
    raise WireError("malformed message on the worker's channel")
