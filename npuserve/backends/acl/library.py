"""Finding `acl`, checking what it returns, and starting it once in a process.

`AclLibrary` is the only place that touches the module: every call goes through `call`, `value`,
`handle` or `ask`, which turn a return code into an error with its name, the call, a hint and the
runtime's own message.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import threading
from typing import Any

from npuserve.backends.acl import codes
from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NpuserveError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

MISSING = (
    "Python module 'acl' is not there: install CANN (toolkit or nnrt) and source its set_env.sh, "
    "such as /usr/local/Ascend/ascend-toolkit/set_env.sh, before the server starts "
    "(to try without a card: --npu-simulator=1)"
)


class AclCallError(NpuserveError):
    """A call of the Ascend runtime that did not return success.

    Attributes:
        call: such as "acl.rt.malloc".
        ret: the return code; 0 when the call has none and failed by its value.
    """

    call: str = ""
    ret: int = 0


class AclInternalError(AclCallError, InternalError):
    """A failure on the server's side."""


class AclInvalidArgumentError(AclCallError, InvalidArgumentError):
    """A gear or shape that the model was not compiled for."""


class AclUnavailableError(AclCallError, UnavailableError):
    """Out of device memory, streams or events: may work later or elsewhere."""


def make_error(call: str, ret: int, detail: str, context: str = "") -> AclCallError:
    """The exception for a failed call.

    Args:
        detail: text of `acl.get_recent_err_msg`, "" for none.
        context: what the call was made for, "" for nothing to add.
    """
    info = codes.CODES.get(ret)
    parts = [f"{call} failed"]
    if ret:
        parts[0] += f" with {ret}" + (f" (ACL_ERROR_{info.name})" if info else "")
    if context:
        parts[0] += f" {context}"
    if info is not None and info.hint:
        parts.append(info.hint)
    if detail:
        parts.append(f"the runtime says: {' '.join(detail.split())}")
    kind: type[AclCallError] = AclInternalError
    if codes.is_out_of_resources(ret):
        kind = AclUnavailableError
    elif codes.is_bad_request(ret):
        kind = AclInvalidArgumentError
    error = kind("; ".join(parts))
    error.call = call
    error.ret = ret
    return error


class AclLibrary:
    """The `acl` module with every return code checked."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._functions: dict[str, Any] = {}

    def _function(self, name: str) -> Any:
        function = self._functions.get(name)
        if function is None:
            target: Any = self.module
            for part in name.split(".")[1:]:
                target = getattr(target, part)
            function = self._functions[name] = target
        return function

    def has(self, name: str) -> bool:
        """Whether this CANN has the call (newer releases add some)."""
        try:
            self._function(name)
        except AttributeError:
            return False
        return True

    def error(self, name: str, ret: int, context: str = "") -> AclCallError:
        """The error of a call that just failed in this thread."""
        return make_error(name, ret, self._recent_error(), context)

    def call(self, name: str, *args: Any, context: str = "") -> None:
        """Make a call that returns `ret`.

        Raises:
            AclCallError: it is not 0.
        """
        ret = self._function(name)(*args)
        if ret != codes.SUCCESS:
            raise self.error(name, ret, context)

    def value(self, name: str, *args: Any, context: str = "") -> Any:
        """Make a call that returns `(value, …, ret)`; the value, or a tuple of several.

        Raises:
            AclCallError: `ret` is not 0.
        """
        *values, ret = self._function(name)(*args)
        if ret != codes.SUCCESS:
            raise self.error(name, ret, context)
        return values[0] if len(values) == 1 else tuple(values)

    def ask(self, name: str, *args: Any, failed: Any = 0) -> Any:
        """Make a call that returns a value without a code.

        Args:
            failed: value after a failure. It may be a true answer as well, so the thread's error
                text decides; as that may be an old one, the call is made a second time.

        Raises:
            AclCallError: it failed twice.
        """
        function = self._function(name)
        value = function(*args)
        if value != failed or not self._recent_error():
            return value
        value = function(*args)
        if value == failed:
            detail = self._recent_error()
            if detail:
                raise make_error(name, 0, detail)
        return value

    def discard(self, name: str, *args: Any) -> None:
        """Make a call that gives something back, returns nothing and cannot fail."""
        self._function(name)(*args)

    def _recent_error(self) -> str:
        """Text of this thread's last failure; reading clears it."""
        return self._function("acl.get_recent_err_msg")() or ""

    def handle(self, name: str, *args: Any, context: str = "") -> int:
        """Make a call that returns a handle, 0 for failure.

        Raises:
            AclCallError: the handle is null.
        """
        handle: int = self._function(name)(*args)
        if not handle:
            raise self.error(name, 0, context)
        return handle

    def release(self, name: str, *args: Any) -> None:
        """Make a call that gives something back, a second time if the first one fails.

        Nothing else will free the resource, so a failure that passes must not leak it.

        Raises:
            AclCallError: it failed twice.
        """
        try:
            self.call(name, *args)
        except AclCallError as error:
            logger.warning("%s; trying once more", error)
            self.call(name, *args)


class _Process:
    """The runtime's state in this process: loaded at most once, initialised at most once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: AclLibrary | None = None
        self._pid = 0
        self._must_finalize = False

    def library(self) -> AclLibrary:
        with self._lock:
            if self._library is not None:
                if self._pid != os.getpid():
                    raise InternalError(
                        "the Ascend runtime does not survive a fork: start worker processes by "
                        "spawning and initialise acl in the child"
                    )
                return self._library
            library = AclLibrary(import_acl())
            self._initialize(library)
            self._library = library
            self._pid = os.getpid()
            return library

    def _initialize(self, library: AclLibrary) -> None:
        try:
            library.call("acl.init")
        except AclCallError as error:
            # Somebody else in this process (torch_npu, onnxruntime, user code) was first and
            # will finalize it.
            if error.ret != codes.REPEAT_INITIALIZE:
                raise
        else:
            self._must_finalize = True
            # Not when the last model goes: finalize may wait two seconds for device logs, and
            # would pull the runtime from under other users in the process.
            atexit.register(self.shutdown)

    def shutdown(self) -> None:
        with self._lock:
            library, self._library = self._library, None
            if library is None or not self._must_finalize or self._pid != os.getpid():
                return
            self._must_finalize = False
            atexit.unregister(self.shutdown)
            try:
                library.call("acl.finalize")
            except AclCallError as error:
                if error.ret != codes.REPEAT_FINALIZE:
                    logger.warning("%s", error)


_process = _Process()


def import_acl() -> Any:
    """The `acl` module.

    Raises:
        UnavailableError: CANN is not there, or its libraries do not load.
    """
    try:
        return importlib.import_module("acl")
    except ModuleNotFoundError as error:
        if error.name != "acl":
            raise UnavailableError(f"Python module 'acl' does not load: {error}") from error
        raise UnavailableError(MISSING) from error
    except ImportError as error:
        raise UnavailableError(
            f"Python module 'acl' does not load: {error}; source the set_env.sh of CANN before "
            "the server starts"
        ) from error


def load_library() -> AclLibrary:
    """The runtime, initialised. Imports and initialises on the first call in a process.

    Raises:
        UnavailableError: CANN is not there.
        AclCallError: `acl.init` failed.
    """
    return _process.library()


def shutdown() -> None:
    """Finalize the runtime if npuserve initialised it. Also done at exit; harmless when repeated.

    Every context must be closed before.
    """
    _process.shutdown()
